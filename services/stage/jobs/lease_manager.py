"""The ledger: the head's one thread that talks to Postgres. Claims rows, saves heartbeats and tokens, commits ends.

Engine and Celery hand over through queues and never wait for it. While Postgres is away nothing new is claimed, what
ended waits here, and the engine stops by itself before a lease can run out (self-fencing).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import structlog
from sqlalchemy import Engine as Database
from sqlalchemy.exc import DBAPIError

from services.stage.celery.delivery import Delivery
from services.stage.engine.engine import HeadEngine
from services.stage.jobs.checkpoints import beats_of
from services.stage.jobs.claimer import Claimer
from services.stage.jobs.delta_publisher import DeltaPublisher
from services.stage.jobs.engine_requests import EngineRequests
from services.stage.jobs.identity import Identity
from services.stage.jobs.live_job import LiveJob
from services.stage.jobs.outcome import CELERY_STATES, JobOutcome
from services.stage.jobs.quarantine import Moment, Seats, beginnable
from services.stage.jobs.readiness import PipelineReadiness
from services.stage.scheduling.events import Crashed, Event, MayBegin, NewTokens, Outgrown
from shardline.clock import lease_clock_s
from shardline.config import Times
from shardline.failpoints import Point, failpoint
from shardline.job import FinishReason, JobState
from shardline.store import claims, crashes, ends, leases
from shardline.store.claims import Claimed
from shardline.store.database import Failure, failure_of
from shardline.wire import Delta

log = structlog.get_logger(__name__)

USED_UP = "its crashes are used up"


class LeaseManager(threading.Thread):
    """The pool's desk on a head. Every live job and its ticket pass through here exactly once."""

    def __init__(
        self,
        *,
        database: Database,
        engine: HeadEngine,
        requests: EngineRequests,
        publisher: DeltaPublisher,
        on_announced: Callable[[], None],
        on_superseded: Callable[[int], None],
        on_blamed: Callable[[Iterable[str]], None],
        seats: Seats,
        times: Times,
    ) -> None:
        super().__init__(name="ledger", daemon=True)
        self._database = database
        self._engine = engine
        self._requests = requests
        self._publisher = publisher
        self._on_blamed = on_blamed
        self._times = times
        self._standing = PipelineReadiness(
            database, seats=seats.num_any, times=times, on_announced=on_announced, on_superseded=on_superseded
        )
        self._claiming = Claimer(database=database, seats=seats, times=times)
        self._blamed: deque[tuple[str, int]] = deque()
        self._outgrown: deque[Outgrown] = deque()
        self._called: list[tuple[str, int]] = []
        self._events: deque[Event] = deque()
        self._cancels: deque[str] = deque()
        self._live: dict[tuple[str, int], LiveJob] = {}
        self._ended: dict[tuple[str, int], JobOutcome] = {}
        self._woken = threading.Event()
        self._open = True
        self._giving_back = False
        self._running = True
        self._next_beat_s = 0.0
        self._last_step = -1
        self._last_move_s = time.monotonic()
        self._failing_since_s: float | None = None
        self._failures: set[str | None] = set()
        """SQLSTATEs that were told since then."""

    # From other threads -----------------------------------------------------------------------------------------

    def offer(self, ticket: Delivery) -> None:
        """Celery's thread: claim this row, soon."""
        self._claiming.offer(ticket)
        self._woken.set()

    def report(self, events: Sequence[Event]) -> None:
        """The engine's thread: tokens and ends, in order."""
        if events:
            self._events.extend(events)
            self._woken.set()

    def cancel(self, job_ids: Sequence[str]) -> int:
        """Celery's thread: stop those that run here; how many did."""
        here = {job_id for job_id, _ in list(self._live)}.intersection(job_ids)
        self._cancels.extend(here)
        self._woken.set()
        return len(here)

    def ready(self, identity: Identity) -> None:
        """The pipeline's thread: a generation can pass through every stage; as `identity` from now on."""
        self._standing.ready(identity)
        self._woken.set()

    def lost(self) -> None:
        """The pipeline's thread: a stage is gone. Leases are kept for `recover_s`."""
        self._standing.lost()
        self._woken.set()

    def close(self) -> None:
        """Celery's thread, at shutdown: no new claims; what waits goes back unread."""
        self._open = False
        self._woken.set()

    def give_back(self) -> None:
        """Celery's thread: checkpoint and give back every lease, once."""
        self._giving_back = True
        self._woken.set()

    def stop(self) -> None:
        """End the thread; what is live is given back first."""
        self._open, self._giving_back, self._running = False, True, False
        self._woken.set()

    def stats(self) -> Mapping[str, Any]:
        """For `inspect stats`."""
        return {
            "live": len(self._live),
            "uncommitted": len(self._ended),
            "database_away": self._failing_since_s is not None,
        }

    # The thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until stopped and empty. Each turn does all that waits, in batches."""
        while self._running or ((self._live or self._ended) and self._failing_since_s is None):
            self._woken.wait(max(0.0, self._next_beat_s - time.monotonic()))
            self._woken.clear()
            self._note_events()
            try:
                self._standing.announce()
                self._commit_ends()
                self._give_back_blamed()
                self._give_back_outgrown()
                self._begin_called()
                self._claim_offers()
                if self._giving_back or (self._standing.is_given_up and self._live):
                    self._release_all()
                if time.monotonic() >= self._next_beat_s:
                    self._next_beat_s = time.monotonic() + self._times.heartbeat_s
                    self._beat()
                    self._claiming.again()
                    self._database_is_back()
            except DBAPIError as error:
                self._database_fails(failure_of(error))
                self._next_beat_s = time.monotonic() + self._times.heartbeat_s

    def _note_events(self) -> None:
        while self._cancels:
            job_id = self._cancels.popleft()
            for key in [key for key in self._live if key[0] == job_id]:
                self._engine.end(key, FinishReason.CANCELLED)
        while self._events:
            event = self._events.popleft()
            job = self._live.get(event.key)
            if job is None:
                continue
            if isinstance(event, NewTokens):
                # Other suspects wait until this one's token is saved.
                self._next_beat_s = 0.0 if job.is_unproven and job.claimed.crashes > 0 else self._next_beat_s
                self._publish(job, job.take(event))
            elif isinstance(event, Crashed):
                self._blamed.append(event.key)
            elif isinstance(event, Outgrown):
                self._outgrown.append(event)
            elif isinstance(event, MayBegin):
                self._called.append(event.key)
            else:
                del self._live[event.key]
                self._ended[event.key] = JobOutcome(job=job, event=event)

    def _publish(self, job: LiveJob, delta: Delta) -> None:
        """At once on an exact pipeline: a resume gives the same tokens. Else after the commit that holds them."""
        if job.exact:
            self._publisher.delta(job.job_id, delta)
        else:
            job.held.append(delta)

    def _begin_called(self) -> None:
        """Parked jobs there is room for: in Postgres first, so that it can tell what was computed when a head dies."""
        called = [job for key in self._called if (job := self._live.get(key)) is not None]
        chosen = beginnable(called, self._moment()) if called and self._standing.identity else []
        if chosen:
            with self._database.begin() as connection:
                begun = claims.begin_held(connection, [(job.job_id, job.claimed.fence) for job in chosen])
        self._called = [job.key for job in called if job not in chosen]
        for job in chosen:
            if job.job_id in begun:
                job.begin(self._engine.pulse.num_steps)
                self._engine.begin(job.key)
            else:
                self._lose(job)

    def _claim_offers(self) -> None:
        """While the pipeline forms anew, offers wait; at shutdown they go back unread, to be sent again at once."""
        identity = self._standing.identity
        if not self._open:
            self._claiming.return_unread()
        elif identity is not None:
            for sent_s, rows in self._claiming.turn(identity, self._moment()):
                if not self._live:
                    self._renew_fence(sent_s)
                for row, ticket in rows:
                    self._start(row, ticket, identity)

    def _moment(self) -> Moment:
        now_s = time.monotonic()
        return Moment(
            live=self._live.values(),
            now_s=now_s,
            heartbeat_s=self._times.heartbeat_s,
            num_steps=self._engine.pulse.num_steps,
            is_moving=now_s - self._last_move_s < 1.5 * self._times.heartbeat_s,
        )

    def _start(self, row: Claimed, ticket: Delivery, identity: Identity) -> None:
        job = LiveJob.from_claim(row, ticket, identity, self._engine.pulse.num_steps)
        self._live[job.key] = job
        ticket.accept()
        self._engine.add(*self._requests.build(row))

    def _beat(self) -> None:
        """Renews the leases and saves new tokens. A hung engine's leases are left to run out."""
        now_s, sent_s = time.monotonic(), lease_clock_s()
        self._standing.renew()
        if not self._live:
            self._renew_fence(sent_s)
            return
        if self._engine.pulse.num_steps != self._last_step or self._engine.fenced or self._standing.is_recovering:
            self._last_step, self._last_move_s = self._engine.pulse.num_steps, now_s
        elif now_s - self._last_move_s > self._times.stall_s * self._standing.num_stages:
            return
        jobs = list(self._live.values())
        beats = beats_of(jobs)
        with self._database.begin() as connection:
            replies = leases.heartbeat(connection, beats, lease_s=self._times.lease_s)
            failpoint(Point.HEARTBEAT_BEFORE_COMMIT)
        failpoint(Point.HEARTBEAT_AFTER_COMMIT)
        self._renew_fence(sent_s)
        for job, beat in zip(jobs, beats, strict=True):
            reply = replies.get((beat.job_id, beat.fence))
            if reply is None:
                self._lose(job)
                continue
            job.num_saved = beat.start + len(beat.ids)
            if job.claimed.crashes > 0 and beat.ids:
                self._engine.trust(job.key)
            if job.num_saved == len(job.ids):
                self._publish_held(job)
            if reply.cancel_requested or reply.expired:
                self._engine.end(job.key, FinishReason.CANCELLED if reply.cancel_requested else FinishReason.EXPIRED)

    def _commit_ends(self) -> None:
        """Every end that waits, in one transaction. A COMMIT whose outcome is unknown is simply done again."""
        if not self._ended:
            return
        endings = list(self._ended.values())
        with self._database.begin() as connection:
            committed = ends.end_running(connection, [ending.row() for ending in endings])
            failpoint(Point.END_BEFORE_COMMIT)
        failpoint(Point.END_AFTER_COMMIT)
        for ending in endings:
            job = ending.job
            del self._ended[job.key]
            state = committed.get(job.job_id)
            if state is not ending.state:
                # A relay was first: lease lost, or cancelled or expired under the same fence.
                job.ticket.revoke() if state in (JobState.CANCELLED, JobState.EXPIRED) else job.ticket.drop()
                continue
            self._publish_held(job)
            self._publisher.delta(job.job_id, ending.last_delta())
            self._publisher.result(job.job_id, ending.value(), ending.celery_state)
            ending.settle()
        self._claiming.again()

    def _give_back_blamed(self) -> None:
        """Jobs under which the pipeline broke while they ran alone: a crash of theirs, or their end."""
        jobs = [self._live[key] for key in self._blamed if key in self._live]
        if jobs:
            with self._database.begin() as connection:
                leases.heartbeat(connection, [job.beat() for job in jobs], lease_s=self._times.lease_s)
                fates = crashes.requeue_or_fail_held(connection, [(job.job_id, job.claimed.fence) for job in jobs])
            self._on_blamed(fates.values())
            log.warning(
                "the pipeline broke under suspects", fates={str(job_id): fate for job_id, fate in fates.items()}
            )
        for job in jobs:
            if fates.get(job.job_id) == JobState.FAILED:
                last = Delta(fence=job.claimed.fence, start=len(job.ids), state=JobState.FAILED)
                self._publisher.delta(job.job_id, last)
                self._publisher.result(job.job_id, RuntimeError(USED_UP), CELERY_STATES[JobState.FAILED])
                job.ticket.fail(USED_UP)
            self._lose(job)
        self._blamed.clear()

    def _give_back_outgrown(self) -> None:
        """Jobs that need more KV than this pipeline has: a claim here does not get them again, a larger one does."""
        outgrown = [event for event in self._outgrown if event.key in self._live]
        self._release([self._live[event.key] for event in outgrown])
        for event in outgrown:
            log.warning(
                "a job needs more KV than this pipeline has: given back, for a larger one to go on",
                job_id=event.key[0],
                tokens=event.num_tokens,
            )
        self._outgrown.clear()

    def _release_all(self) -> None:
        self._release(list(self._live.values()))
        self._giving_back = False

    def _release(self, jobs: Sequence[LiveJob]) -> None:
        """Checkpoint and give back: the jobs go on elsewhere, or here later. No crash is counted."""
        if jobs:
            with self._database.begin() as connection:
                leases.heartbeat(connection, [job.beat() for job in jobs], lease_s=self._times.lease_s)
                ends.release_running(connection, [(job.job_id, job.claimed.fence) for job in jobs])
            log.info("leases given back", jobs=len(jobs))
        for job in jobs:
            self._lose(job)

    def _lose(self, job: LiveJob) -> None:
        """Not ours any more: forget it without a trace."""
        del self._live[job.key]
        self._engine.forget(job.key)
        job.ticket.drop()

    def _publish_held(self, job: LiveJob) -> None:
        for delta in job.held:
            self._publisher.delta(job.job_id, delta)
        job.held.clear()

    def _renew_fence(self, sent_s: float) -> None:
        self._engine.may_run_until_s = sent_s + self._times.lease_s - self._times.fence_margin_s

    def _database_fails(self, failure: Failure) -> None:
        """Whatever it is, it is tried again. It is told when it begins and when it is another one."""
        if self._failing_since_s is None:
            self._failing_since_s = time.monotonic()
        if failure.sqlstate not in self._failures:
            self._failures.add(failure.sqlstate)
            tell = log.warning if failure.is_lost else log.error
            what = "Postgres is away" if failure.is_lost else "Postgres refuses a statement"
            tell(f"{what}: nothing is claimed, ends wait", sqlstate=failure.sqlstate, error=failure.problem)
        self._woken.wait(min(1.0, self._times.poll_s))

    def _database_is_back(self) -> None:
        if self._failing_since_s is not None:
            log.info("Postgres is back", away_s=round(time.monotonic() - self._failing_since_s, 1))
            self._failing_since_s = None
            self._failures.clear()
