"""How live jobs leave a head: committed, counted a crash, or given back. Owns what waits for a
COMMIT.

Does not know when leases are renewed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

import structlog
from sqlalchemy import Connection
from sqlalchemy import Engine as Database

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
from shardline_scheduler.events import KvExceeded, SequenceCrashed, SequenceFailed, SequenceFinished
from shardline_server.failpoints import Point, failpoint
from shardline_server.store import celery_tasks, claims, crashes, ends, leases

log = structlog.get_logger(__name__)

USED_UP = "its crashes are used up"
AGAIN_S = 0.1
"""Until an end is tried again that another transaction held up."""


class Finisher:
    """Runs in the lease manager's thread. Each method is one transaction; a COMMIT with an unknown
    outcome is simply done again."""

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
        self._crashed: list[SequenceCrashed] = []
        self._outgrown: list[KvExceeded] = []

    @property
    def num_uncommitted(self) -> int:
        """The number of ended jobs with results that are not in Postgres yet."""
        return len(self._outcomes) + len(self._held_up)

    @property
    def wait_s(self) -> float:
        """Returns the seconds until what is held up is tried again."""
        return max(0.0, self._again_s - monotonic_s()) if self._held_up else math.inf

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
        """Every result that waits, in one transaction. Returns whether there was any: seats are
        free. What another transaction has locked is tried again, until its lease is over and a
        relay may requeue it."""
        is_again = self.wait_s == 0.0
        outcomes = [*(self._held_up if is_again else ()), *self._outcomes]
        if not outcomes:
            return False
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
        self._outcomes = []
        self._held_up = kept if is_again else [*self._held_up, *kept]
        if kept:
            self._again_s = monotonic_s() + AGAIN_S
        for outcome in outcomes:
            if outcome in kept:
                continue
            job_id = outcome.job.job_id
            if again.get(job_id):
                self._host.observer.given_back(outcome.job, "failed")
            self._settle(outcome, committed.get(job_id), is_told=job_id in told_by_relays)
        return len(outcomes) > len(kept)

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
