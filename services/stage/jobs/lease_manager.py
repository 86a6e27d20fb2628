"""The head's one thread that talks to Postgres about jobs: claims, heartbeats, ends, in batches.
Owns the order of the work; each kind of statement has a separate part.

Engine and Celery hand over through queues and never wait for it. While Postgres is unreachable
nothing new is claimed, results wait here, and the engine stops by itself before a lease can run out
(self-fencing).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum, auto
from typing import Any

from sqlalchemy import Engine as Database
from sqlalchemy.exc import DBAPIError

from services.stage.celery.delivery import Delivery
from services.stage.jobs.claimer import Claimer
from services.stage.jobs.delta_publisher import DeltaPublisher
from services.stage.jobs.engine_requests import EngineRequests
from services.stage.jobs.finisher import Finisher
from services.stage.jobs.heartbeater import Heartbeater
from services.stage.jobs.identity import Identity
from services.stage.jobs.job_engine import JobEngine
from services.stage.jobs.lease_host import LeaseHost
from services.stage.jobs.live_jobs import LiveJobs
from services.stage.jobs.outage import Outage
from services.stage.jobs.quarantine import Seats
from services.stage.jobs.readiness import PipelineReadiness
from shardline.base.config import Times
from shardline.contract.job import INTERACTIVE, FinishReason
from shardline.store.connection.database import failure_of
from shardline_scheduler.events import Event, MayBegin, NewTokens, SequenceCrashed
from shardline_server.host.duty_cycle import DutyCycle

SHARE = 0.5
"""Of the interpreter, while the engine waits for it."""
LONGEST_REST_S = 0.02


class Phase(IntEnum):
    """Tells the phase of a head's life; it only advances."""

    SERVING = auto()
    DRAINING = auto()
    """Nothing new is claimed; what runs may end."""
    RELEASING = auto()
    """What runs is saved and given back."""
    STOPPED = auto()
    """The thread ends once nothing is live, or Postgres cannot be informed."""


class LeaseManager(threading.Thread):
    """Takes the pool's deliveries on a head. Every live job passes through here exactly once."""

    def __init__(
        self,
        *,
        database: Database,
        engine: JobEngine,
        requests: EngineRequests,
        publisher: DeltaPublisher,
        host: LeaseHost,
        seats: Seats,
        times: Times,
    ) -> None:
        super().__init__(name="lease-manager", daemon=True)
        # Set once.
        self._engine = engine
        self._publisher = publisher
        self._times = times
        # Other threads write, this one reads.
        self._woken = threading.Event()
        self._events: deque[Event] = deque()
        self._cancels: deque[str] = deque()
        self._phase = Phase.SERVING
        # This thread's.
        self._jobs = LiveJobs(engine)
        self._readiness = PipelineReadiness(database, seats=seats.num_any, times=times, host=host)
        self._claimer = Claimer(
            database=database,
            engine=engine,
            requests=requests,
            jobs=self._jobs,
            seats=seats,
            times=times,
        )
        self._heartbeater = Heartbeater(
            database=database,
            engine=engine,
            jobs=self._jobs,
            publisher=publisher,
            readiness=self._readiness,
            times=times,
        )
        self._finisher = Finisher(
            database=database,
            jobs=self._jobs,
            replies=requests.replies,
            publisher=publisher,
            host=host,
            times=times,
        )
        self._outage = Outage()
        self._has_failed = False
        """Whether this turn's work did, but for the heartbeat."""
        self._duty = DutyCycle(share=SHARE, longest_rest_s=LONGEST_REST_S)

    # From other threads
    # -----------------------------------------------------------------------------------------

    def offer(self, delivery: Delivery) -> None:
        """Celery's thread: claim this row, soon."""
        self._claimer.offer(delivery)
        if delivery.priority in INTERACTIVE:
            self._duty.hasten()
        self._woken.set()

    def report(self, events: Sequence[Event]) -> None:
        """The engine's thread: tokens and ends, in order. Tokens of an exact job go to its readers
        at once, since a resume gives the same ones; others after the COMMIT that holds them. So no
        reader waits for Postgres."""
        for event in events:
            if (job := self._jobs.get(event.key)) is None:
                continue
            if isinstance(event, SequenceCrashed):
                job.broken_epoch = self._engine.epoch
            elif isinstance(event, NewTokens):
                is_first = job.first_token_s is None
                job.note_token()
                if job.exact:
                    is_urgent = is_first and job.claimed.priority in INTERACTIVE
                    self._publisher.delta(job.job_id, job.delta(event), is_urgent=is_urgent)
        if events:
            self._events.extend(events)
            self._woken.set()

    def cancel(self, job_ids: Sequence[str]) -> int:
        """Celery's thread: stop those that run here; how many did."""
        here = {job.key[0] for job in self._jobs}.intersection(job_ids)
        self._cancels.extend(here)
        self._woken.set()
        return len(here)

    def let_go(self, identity: Identity) -> None:
        """The pipeline's thread, before the engine is wired for an epoch of `identity`: exact jobs
        that began with other bits get no token from it."""
        for job in self._jobs:
            if not job.keeps_bits_on(identity):
                self._engine.forget(job.key)

    def ready(self, identity: Identity) -> None:
        """The pipeline's thread: a generation can pass through every stage; as `identity` from now
        on."""
        self._readiness.ready(identity)
        self._woken.set()

    def lost(self) -> None:
        """The pipeline's thread: a stage is gone. Leases are kept for `recover_s`."""
        self._readiness.lost()
        self._woken.set()

    def close(self) -> None:
        """Celery's thread, at shutdown: no new claims; what waits goes back unread."""
        self._advance(Phase.DRAINING)

    def give_back(self) -> None:
        """Celery's thread: checkpoint and give back every lease."""
        self._advance(Phase.RELEASING)

    def stop(self) -> None:
        """End the thread; what is live is given back first."""
        self._advance(Phase.STOPPED)

    def stats(self) -> Mapping[str, Any]:
        """Returns what `inspect stats` shows."""
        return {
            "live": len(self._jobs),
            "uncommitted": self._finisher.num_uncommitted,
            "database_away": self._outage.is_on,
        }

    def _advance(self, phase: Phase) -> None:
        self._phase = max(self._phase, phase)
        self._woken.set()

    # The thread
    # -----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Works until stopped and empty. Each turn does all that waits, in batches."""
        while not self._is_over():
            self._woken.wait(min(self._heartbeater.wait_s, self._finisher.wait_s))
            self._woken.clear()
            with self._duty:
                self._turn()

    def _turn(self) -> None:
        self._pass_cancels()
        self._take_events()
        with self._reporting_outages():
            self._work()
        # By themselves: what Postgres refuses of one job must not end the leases of all others.
        if self._heartbeater.wait_s == 0.0:
            with self._reporting_outages():
                self._heartbeater.postpone()
                self._heartbeater.beat()
                self._claimer.again()
                self._readiness.keep_registered()
                if not self._has_failed:
                    self._outage.end()

    def _work(self) -> None:
        self._has_failed = True
        self._readiness.announce()
        if self._finisher.commit_outcomes():
            self._claimer.again()
        self._finisher.give_back_outgrown()
        if (identity := self._readiness.identity) is not None:
            self._finisher.judge_crashed(identity)
            self._finisher.give_back_inexact(identity)
        self._claim()
        if self._phase >= Phase.RELEASING or self._readiness.is_given_up:
            self._finisher.judge_crashed(None)
            self._finisher.give_back_all()
        self._has_failed = False

    def _is_over(self) -> bool:
        has_work = bool(self._jobs) or self._finisher.num_uncommitted > 0
        return self._phase is Phase.STOPPED and (not has_work or self._outage.is_on)

    def _pass_cancels(self) -> None:
        while self._cancels:
            job_id = self._cancels.popleft()
            for job in self._jobs:
                if job.key[0] == job_id:
                    self._engine.end(job.key, FinishReason.CANCELLED)

    def _take_events(self) -> None:
        while self._events:
            event = self._events.popleft()
            job = self._jobs.get(event.key)
            if job is None:
                continue
            if isinstance(event, NewTokens):
                if job.is_quarantined and job.is_unsaved and not job.is_held_up:
                    # Other quarantined jobs wait until this one's token is saved.
                    self._heartbeater.hasten()
                job.take(event)
            elif isinstance(event, MayBegin):
                self._claimer.note_room(event.key)
            else:
                self._finisher.note(event)

    def _claim(self) -> None:
        """While the pipeline forms, deliveries wait; at shutdown they go back unread, to be sent
        again at once."""
        identity = self._readiness.identity
        if identity is not None:
            self._claimer.begin_parked(self._heartbeater.claim_context())
        if self._phase >= Phase.DRAINING:
            self._claimer.return_unread()
        elif identity is not None:
            self._claimer.claim_waiting(identity, self._heartbeater.claim_context())

    @contextmanager
    def _reporting_outages(self) -> Iterator[None]:
        """Whatever fails is tried again, in the next turn."""
        try:
            yield
        except DBAPIError as error:
            failure = failure_of(error)
            self._outage.begin(failure)
            self._woken.wait(min(1.0, self._times.poll_s))
            if failure.is_lost:
                self._heartbeater.postpone()
