"""How live jobs leave a head: committed, counted a crash, or given back. Owns what waits for a
COMMIT.

Does not know when leases are renewed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import structlog
from sqlalchemy import Connection
from sqlalchemy import Engine as Database
from sqlalchemy.exc import DBAPIError

from services.stage.jobs.chat_replies import ChatReplies
from services.stage.jobs.delta_publisher import DeltaPublisher
from services.stage.jobs.identity import Identity
from services.stage.jobs.lease_host import LeaseHost
from services.stage.jobs.live_job import LiveJob
from services.stage.jobs.live_jobs import LiveJobs
from services.stage.jobs.outcome import JobOutcome
from shardline.base.clock import lease_clock_s, monotonic_s
from shardline.base.config import Times
from shardline.contract.job import JobState
from shardline.contract.wire import Delta
from shardline.store.connection.database import Failure, failure_of
from shardline_scheduler.events import KvExceeded, SequenceCrashed, SequenceFailed, SequenceFinished
from shardline_server.failpoints import Point, failpoint
from shardline_server.store import celery_tasks, claims, crashes, ends, leases

log = structlog.get_logger(__name__)

USED_UP = "its crashes are used up"
AGAIN_S = 0.1
"""Until an end is tried again that another transaction held up."""
MAX_TRIES = 3
"""Of an end that Postgres refuses by itself. With the heartbeats between them they take less than
half of a lease, so that its job can end otherwise under the same fence."""
BEATS_BETWEEN = 2
FIRST_WAIT_S = 60.0
LONGEST_WAIT_S = 86_400.0
"""Until a job is computed again that cannot end; doubled by each claim."""
OF_SERVER = ("3F000", "40", "42703", "42P01", "53", "55P03", "57", "58", "XX")
"""SQLSTATEs that begin so refuse any end: without tables, memory, disk or time. All ends wait."""


@dataclass(slots=True, kw_only=True, eq=False)
class RefusedOutcome:
    """An outcome that Postgres refuses by itself: a trigger or a rule of an operator raises."""

    outcome: JobOutcome
    due_s: float
    num_tries: int = 1


class Finisher:
    """Runs in the lease manager's thread. What one method does is one transaction, unless Postgres
    refuses one of many outcomes; a COMMIT with an unknown outcome is simply done again."""

    def __init__(
        self,
        *,
        database: Database,
        jobs: LiveJobs,
        replies: ChatReplies,
        publisher: DeltaPublisher,
        host: LeaseHost,
        times: Times,
    ) -> None:
        self._database = database
        self._jobs = jobs
        self._replies = replies
        self._publisher = publisher
        self._host = host
        self._times = times
        self._outcomes: list[JobOutcome] = []
        self._held_up: list[JobOutcome] = []
        """Other transactions have their rows locked."""
        self._again_s = 0.0
        """When they are tried again."""
        self._refused: list[RefusedOutcome] = []
        """They are tried one by one, so that they hold up no other."""
        self._crashed: list[SequenceCrashed] = []
        self._outgrown: list[KvExceeded] = []

    @property
    def num_uncommitted(self) -> int:
        """The number of ended jobs with results that are not in Postgres yet."""
        return len(self._outcomes) + len(self._held_up) + len(self._refused)

    @property
    def wait_s(self) -> float:
        """Returns the seconds until what is held up or refused is tried again."""
        due_s = [one.due_s for one in self._refused]
        if self._held_up:
            due_s.append(self._again_s)
        return max(0.0, min(due_s, default=math.inf) - monotonic_s())

    def note(self, event: SequenceFinished | SequenceFailed | SequenceCrashed | KvExceeded) -> None:
        """The engine has let go of a job."""
        if isinstance(event, SequenceCrashed):
            self._crashed.append(event)
        elif isinstance(event, KvExceeded):
            self._outgrown.append(event)
        else:
            job = self._jobs.remove(event.key)
            self._outcomes.append(JobOutcome(job=job, event=event, replies=self._replies))

    def commit_outcomes(self) -> bool:
        """Commits every result that waits, in one transaction, or one by one if Postgres refuses
        one of them. Returns whether any job left: seats are free. What another transaction has
        locked is tried again, until its lease is over and a relay may requeue it; what is refused
        has MAX_TRIES, then its job fails."""
        is_again = monotonic_s() >= self._again_s
        outcomes = [*(self._held_up if is_again else ()), *self._outcomes]
        num_left = 0
        try:
            num_left += self._commit(outcomes) if outcomes else 0
        except DBAPIError as error:
            _check_refusal(error)
            for outcome in outcomes:
                num_left += self._commit_alone(outcome)
        for refused in [one for one in self._refused if one.due_s <= monotonic_s()]:
            num_left += self._try_refused(refused)
        return num_left > 0

    def _commit(self, outcomes: Sequence[JobOutcome]) -> int:
        """Commits these in one transaction. Returns how many jobs left."""
        with self._database.begin() as connection:
            again = self._try_again(connection, outcomes)
            ended = [outcome for outcome in outcomes if again.get(outcome.job.job_id) is False]
            committed = ends.end_running(connection, [outcome.row() for outcome in ended])
            held_up = [
                outcome
                for outcome in outcomes
                if outcome.job.job_id not in again
                or committed.get(outcome.job.job_id) is JobState.RUNNING
            ]
            kept = self._kept(connection, held_up)
            told_by_relays = self._told_by_relays(connection, committed)
            failpoint(Point.END_BEFORE_COMMIT)
        failpoint(Point.END_AFTER_COMMIT)
        self._take_off(outcomes)
        self._held_up += kept
        if kept:
            self._again_s = monotonic_s() + AGAIN_S
        for outcome in outcomes:
            if outcome in kept:
                continue
            job_id = outcome.job.job_id
            if again.get(job_id):
                self._host.observer.given_back(outcome.job, "failed")
            self._settle(outcome, committed.get(job_id), is_told=job_id in told_by_relays)
        return len(outcomes) - len(kept)

    def _take_off(self, outcomes: Iterable[JobOutcome]) -> None:
        tried = set(outcomes)
        self._outcomes = [one for one in self._outcomes if one not in tried]
        self._held_up = [one for one in self._held_up if one not in tried]

    def _commit_alone(self, outcome: JobOutcome) -> int:
        """Commits one of many, or sets it aside if it is the refused one."""
        try:
            return self._commit([outcome])
        except DBAPIError as error:
            failure = _check_refusal(error)
        log.error(
            "Postgres refuses the end of a job: it is tried again by itself",
            job_id=str(outcome.job.job_id),
            sqlstate=failure.sqlstate,
            error=failure.problem,
        )
        self._take_off([outcome])
        self._refused.append(RefusedOutcome(outcome=outcome, due_s=self._next_try_s()))
        return 0

    def _next_try_s(self) -> float:
        return monotonic_s() + BEATS_BETWEEN * self._times.heartbeat_s

    def _try_refused(self, refused: RefusedOutcome) -> int:
        """Tries it again; the last time its job fails instead, or else waits."""
        outcome = refused.outcome
        try:
            num_left = self._commit([outcome])
        except DBAPIError as error:
            failure = _check_refusal(error)
            refused.num_tries += 1
            refused.due_s = self._next_try_s()
            if refused.num_tries < MAX_TRIES:
                return 0
            num_left = self._end_refused(outcome, failure)
        self._refused.remove(refused)
        return num_left

    def _end_refused(self, outcome: JobOutcome, failure: Failure) -> int:
        try:
            return self._commit([outcome.refused(failure)])
        except DBAPIError as error:
            _check_refusal(error)
        self._postpone(outcome.job)
        return 1

    def _postpone(self, job: LiveJob) -> None:
        """Gives back a job that cannot even fail, with its tokens. It waits for longer each time,
        so that it takes little of the pipeline while its row cannot end."""
        # No float has the power of a large fence.
        wait_s = min(FIRST_WAIT_S * 2 ** min(job.claimed.fence - 1, 16), LONGEST_WAIT_S)
        try:
            with self._database.begin() as connection:
                self._save(connection, [job])
                waits = {job.attempt: wait_s}
                ends.requeue_running(connection, waits, outcome="failed", waits=waits)
        except DBAPIError as error:
            _check_refusal(error)
            wait_s = 0.0  # Its lease runs out.
        log.error(
            "Postgres refuses every end of a job: given back, to wait",
            job_id=str(job.job_id),
            at_most_s=wait_s,
        )
        self._host.observer.given_back(job, "failed")
        job.delivery.drop()

    def _kept(self, connection: Connection, held_up: Sequence[JobOutcome]) -> list[JobOutcome]:
        """Returns the outcomes with a current lease. The others are given up, which is no crash."""
        now_s = lease_clock_s()
        kept = [outcome for outcome in held_up if now_s < outcome.job.lease_ends_s]
        if given_up := [outcome.job.attempt for outcome in held_up if outcome not in kept]:
            claims.park(connection, given_up)
        return kept

    def _try_again(
        self, connection: Connection, outcomes: Iterable[JobOutcome]
    ) -> dict[UUID, bool]:
        """Requeues failed jobs with an attempt left in their policies. Returns whether each was
        requeued, or is to end; one that is locked or lost is missing."""
        judged = {one.job.job_id: False for one in outcomes if not one.may_try_again}
        failed = [one.job for one in outcomes if one.may_try_again]
        if not failed:
            return judged
        self._save(connection, failed)
        keys = [job.attempt for job in failed]
        return judged | crashes.requeue_failed_held(connection, keys, limits=self._host.limits)

    def _told_by_relays(self, connection: Connection, job_ids: Iterable[UUID]) -> set[UUID]:
        """Returns those jobs that are Celery tasks; without a result backend no caller asks."""
        if self._host.results is None:
            return set()
        return celery_tasks.with_tasks(connection, list(job_ids))

    def _settle(self, outcome: JobOutcome, state: JobState | None, *, is_told: bool) -> None:
        job = outcome.job
        if state is outcome.state:
            self._publisher.deltas(job.job_id, job.take_held())
            self._publisher.delta(job.job_id, outcome.last_delta())
            if self._host.results is not None and not is_told:
                self._tell(job, state, outcome.value())
            outcome.settle()
            self._host.observer.ended(outcome)
        elif state in (JobState.CANCELLED, JobState.EXPIRED):
            job.delivery.revoke()  # A relay was first, under the same fence.
        else:
            job.delivery.drop()  # The lease was lost, or the job is tried again.

    def judge_crashed(self, formed: Identity | None) -> None:
        """Gives back jobs under which the pipeline broke while they ran alone, as soon as it is
        known whether a process ended: `formed` is the pipeline since, None if it stays broken. A
        process that ended is counted a crash, which may be the job's end; a broken link is not."""
        jobs = self._jobs.select(event.key for event in self._crashed)
        waiting = {
            job.key for job in jobs if formed is not None and formed.epoch <= job.broken_epoch
        }
        judged = [job for job in jobs if job.key not in waiting]
        blamed = [job for job in judged if job.is_blamed(formed)]
        self._count_crashes(blamed)
        self._give_back([job for job in judged if job not in blamed])
        self._crashed = [event for event in self._crashed if event.key in waiting]

    def _count_crashes(self, jobs: Sequence[LiveJob]) -> None:
        if jobs:
            with self._database.begin() as connection:
                self._save(connection, jobs)
                keys = [job.attempt for job in jobs]
                outcomes = crashes.requeue_or_fail_held(connection, keys, limits=self._host.limits)
                told_by_relays = self._told_by_relays(connection, outcomes)
            self._host.observer.crashed(outcomes.values())
            log.warning(
                "the pipeline broke under quarantined jobs",
                outcomes={str(key): end for key, end in outcomes.items()},
            )
            for job in jobs:
                if outcomes.get(job.job_id) == JobState.FAILED:
                    self._fail(job, is_told=job.job_id in told_by_relays)
                self._drop(job, "crashed")

    def _fail(self, job: LiveJob, *, is_told: bool) -> None:
        self._publisher.delta(
            job.job_id, Delta(fence=job.claimed.fence, start=len(job.ids), state=JobState.FAILED)
        )
        if not is_told:
            self._tell(job, JobState.FAILED, USED_UP)
        job.delivery.fail(USED_UP)

    def _tell(self, job: LiveJob, state: JobState, value: Any) -> None:
        if self._host.results is not None:
            self._host.results.put(str(job.job_id), state, value)

    def give_back_outgrown(self) -> None:
        """Jobs that need more KV than this pipeline has: a claim here does not get them again, a
        larger one does."""
        jobs = {job.key: job for job in self._jobs.select(event.key for event in self._outgrown)}
        self._give_back(list(jobs.values()))
        for event in self._outgrown:
            if event.key in jobs:
                log.warning(
                    "a job needs more KV than this pipeline has: given back, "
                    "for a larger one to go on",
                    job_id=event.key[0],
                    tokens=event.num_tokens,
                )
        self._outgrown.clear()

    def give_back_inexact(self, identity: Identity) -> None:
        """Gives back exact jobs that the pipeline began with other stages, which had other bits: a
        claim decides what becomes of them."""
        jobs = [job for job in self._jobs if not job.keeps_bits_on(identity)]
        if jobs:
            log.warning(
                "the pipeline computes other bits than before: its exact jobs are given back",
                jobs=len(jobs),
            )
        self._give_back(jobs)

    def give_back_all(self) -> None:
        """Every live job goes on elsewhere, or here later."""
        self._give_back(list(self._jobs))

    def _give_back(self, jobs: Sequence[LiveJob]) -> None:
        """Saves the tokens and ends the leases. No crash is counted."""
        if not jobs:
            return
        with self._database.begin() as connection:
            self._save(connection, jobs)
            released = ends.release_running(connection, [job.attempt for job in jobs])
            if locked := [job.attempt for job in jobs if job.job_id not in released]:
                # Their leases run out, which is no crash of theirs.
                claims.park(connection, locked)
        log.info("leases given back", jobs=len(jobs))
        for job in jobs:
            self._drop(job, "released")

    def _drop(self, job: LiveJob, outcome: str) -> None:
        self._jobs.drop(job)
        self._host.observer.given_back(job, outcome)

    def _save(self, connection: Connection, jobs: Iterable[LiveJob]) -> None:
        leases.heartbeat(connection, [job.beat() for job in jobs], lease_s=self._times.lease_s)


def _check_refusal(error: DBAPIError) -> Failure:
    """Returns why Postgres refuses this row. Raises what would refuse any other, too."""
    failure = failure_of(error)
    if failure.is_lost or (failure.sqlstate or "").startswith(OF_SERVER):
        raise error
    return failure
