"""Deliveries become claimed rows, many in one transaction, and claimed rows become work of the
engine.

Owns the deliveries that wait and the parked jobs that may begin; knows neither heartbeats nor ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

import structlog
from sqlalchemy import Connection
from sqlalchemy import Engine as Database

from services.stage.celery.delivery import Delivery
from services.stage.jobs.claim_queue import ClaimQueue
from services.stage.jobs.engine_requests import EngineRequests
from services.stage.jobs.identity import Identity
from services.stage.jobs.job_engine import JobEngine
from services.stage.jobs.live_job import LiveJob
from services.stage.jobs.live_jobs import LiveJobs
from services.stage.jobs.quarantine import ClaimContext, Seats, beginnable, claimable, without_room
from shardline.base.clock import lease_clock_s
from shardline.base.config import Times
from shardline.store.connection.database import autocommitted
from shardline_scheduler.kv_blocks import BLOCK_TOKENS
from shardline_scheduler.sequence import Key
from shardline_server.failpoints import Point, failpoint
from shardline_server.store import claims, crashes, outbox
from shardline_server.store.claims import Claimant, ClaimedJob

log = structlog.get_logger(__name__)

CLAIM_BATCH = 64
"""Rows of one transaction."""
LOCKED_BEATS = 2
"""The number of heartbeats in which a claim of a locked row is tried again."""


class Claimer:
    """`offer` is for Celery's thread, all else for the lease manager's."""

    def __init__(
        self,
        *,
        database: Database,
        engine: JobEngine,
        requests: EngineRequests,
        jobs: LiveJobs,
        seats: Seats,
        times: Times,
    ) -> None:
        self._database = database
        self._asked = autocommitted(database)
        self._engine = engine
        self._requests = requests
        self._jobs = jobs
        self._seats = seats
        self._times = times
        self._queue = ClaimQueue()
        self._may_begin: list[Key] = []

    def offer(self, delivery: Delivery) -> None:
        """Claim this row, soon."""
        self._queue.put(delivery)

    def again(self) -> None:
        """A seat was left or a token saved: those that wait may have their turn."""
        self._queue.again()

    def claim_waiting(self, identity: Identity, context: ClaimContext) -> None:
        """Claims what may be claimed now and hands it to the engine. The other rows that were asked
        for have ended, are claimed elsewhere or do not fit: their deliveries are dropped, and a
        relay sends what is due again. Those that are locked are asked for again, for a while."""
        for sent_s, rows in self._claim_batches(identity, context):
            ends_s = sent_s + self._times.fence_s
            if not self._jobs:
                self._engine.extend_lease(ends_s)
            for row, delivery in rows:
                request, sink = self._requests.build(row)
                job = LiveJob.from_claim(
                    row,
                    delivery,
                    identity,
                    num_steps=self._engine.num_steps,
                    lease_ends_s=ends_s,
                )
                job.adapter = request.adapter
                self._jobs.add(job)
                delivery.accept()
                self._engine.add(request, sink)

    def return_unread(self) -> None:
        """Sends what waits to another head at once, at shutdown."""
        self._queue.again()
        if not self._queue:
            return
        deliveries = self._queue.take()
        try:
            with self._database.begin() as connection:
                outbox.unstamp(connection, [UUID(delivery.job_id) for delivery in deliveries])
        except BaseException:
            self._queue.put_back(deliveries)
            raise
        for delivery in deliveries:
            delivery.drop()

    def note_room(self, key: Key) -> None:
        """The engine has room for a parked job."""
        self._may_begin.append(key)

    def begin_parked(self, context: ClaimContext) -> None:
        """Parked jobs there is room for: in Postgres first, so that it can tell what was computed
        when a head dies."""
        waiting = self._jobs.select(self._may_begin)
        asked = [job for job in waiting if not job.is_held_up]
        chosen = beginnable(asked, context) if asked else []
        begun: set[UUID] = set()
        if chosen:
            with self._database.begin() as connection:
                begun = claims.begin_held(connection, [job.attempt for job in chosen])
        self._may_begin = [job.key for job in waiting if job.job_id not in begun]
        for job in chosen:
            if job.job_id in begun:
                job.begin(self._engine.num_steps)
                self._engine.begin(job.key)
            else:
                # Locked, or not ours any more: the next heartbeat knows.
                job.is_held_up = True

    def _claim_batches(
        self, identity: Identity, context: ClaimContext
    ) -> Iterator[tuple[float, list[tuple[ClaimedJob, Delivery]]]]:
        """Batch by batch: when it was asked for, and the rows that are ours."""
        if not self._queue:
            return
        waiting = dict.fromkeys(self._queue.take())
        try:
            chosen, with_quarantined = self._choose(list(waiting), context)
            for first in range(0, len(chosen), CLAIM_BATCH):
                deliveries = chosen[first : first + CLAIM_BATCH]
                sent_s = lease_clock_s()
                by_id = {delivery.job_id: delivery for delivery in deliveries}
                rows, held_up = self._claim(list(by_id), identity, context, with_quarantined)
                claimed = [(row, by_id[str(row.job_id)]) for row in rows]
                kept = {delivery for _, delivery in claimed}
                for delivery in deliveries:
                    if delivery.job_id in held_up and self._waits_on(delivery, context):
                        continue
                    del waiting[delivery]
                    if delivery not in kept:
                        delivery.drop()
                yield sent_s, claimed
        finally:
            self._queue.put_back(waiting)

    def _waits_on(self, delivery: Delivery, context: ClaimContext) -> bool:
        """Whether a row that is locked is asked for again: our own transactions have it for a
        moment, a tenant's as long as it likes. A relay sends that one again."""
        if delivery.locked_since_s is None:
            delivery.locked_since_s = context.now_s
        return context.now_s - delivery.locked_since_s <= LOCKED_BEATS * context.heartbeat_s

    def _choose(
        self, deliveries: Sequence[Delivery], context: ClaimContext
    ) -> tuple[list[Delivery], bool]:
        """Those to claim now, and whether they are a quarantined job, alone."""
        with self._asked.connect() as connection:
            found = crashes.quarantined(connection, [delivery.job_id for delivery in deliveries])
        quarantined = [str(job_id) for job_id in found]
        chosen = claimable(deliveries, quarantined, self._seats, context)
        return chosen, any(delivery.job_id in quarantined for delivery in chosen)

    def _claim(
        self, ids: Sequence[str], identity: Identity, context: ClaimContext, with_quarantined: bool
    ) -> tuple[list[ClaimedJob], set[str]]:
        """Claims the chosen jobs; also returns those that another transaction has locked. If an
        engine has died under one elsewhere since the choice, it is not taken with the others, but
        comes again as a quarantined job."""
        failpoint(Point.BEFORE_CLAIM)
        claimant = identity.claimant(self._requests.adapters.known())
        asked: dict[str, Any] = {
            "exact_wait_s": self._times.exact_wait_s,
            "with_quarantined": with_quarantined,
        }
        held_up: set[str] = set()
        with self._database.begin() as connection:
            claimed = claims.claim(connection, ids, claimant, lease_s=self._times.lease_s, **asked)
            if parked := without_room(claimed, context.live, identity.kv_tokens // BLOCK_TOKENS):
                claims.park(connection, parked)
            if others := set(ids) - {str(row.job_id) for row in claimed}:
                self._postpone_unfit(connection, others, claimant, identity)
                held_up = set(map(str, claims.held_up(connection, others, claimant, **asked)))
        if claimed:
            failpoint(Point.AFTER_CLAIM)
        rows = [replace(row, parked=(row.job_id, row.fence) in parked) for row in claimed]
        return rows, held_up

    def _postpone_unfit(
        self, connection: Connection, ids: set[str], claimant: Claimant, identity: Identity
    ) -> None:
        wait_s = self._times.resend_s
        for job_id in claims.postpone_unfit(connection, ids, claimant, wait_s=wait_s):
            log.warning(
                "a job does not fit this pipeline: it waits for more KV, "
                "or for the exact rows that it asks for",
                job_id=str(job_id),
                kv_tokens=identity.kv_tokens,
                exact=identity.exact,
                sent_again_after_s=wait_s,
            )
