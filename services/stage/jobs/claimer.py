"""Tickets become claimed rows, many in one transaction. Owns the tickets that wait; knows no engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from uuid import UUID

import structlog
from sqlalchemy import Connection
from sqlalchemy import Engine as Database

from services.stage.celery.delivery import Delivery
from services.stage.jobs.claim_queue import ClaimQueue
from services.stage.jobs.identity import Identity
from services.stage.jobs.quarantine import Moment, Seats, claimable, without_room
from services.stage.scheduling.kv_blocks import BLOCK_TOKENS
from shardline.clock import lease_clock_s
from shardline.config import Times
from shardline.failpoints import Point, failpoint
from shardline.store import claims, crashes, outbox
from shardline.store.claims import Claimed

log = structlog.get_logger(__name__)

CLAIM_BATCH = 64
"""Rows of one transaction."""


class Claimer:
    """`offer` is for Celery's thread, all else for the ledger's."""

    def __init__(self, *, database: Database, seats: Seats, times: Times) -> None:
        self._database = database
        self._seats = seats
        self._times = times
        self._offers = ClaimQueue()

    def offer(self, ticket: Delivery) -> None:
        """Claim this row, soon."""
        self._offers.put(ticket)

    def again(self) -> None:
        """A seat was left or a token saved: those that wait may have their turn."""
        self._offers.again()

    def turn(self, identity: Identity, moment: Moment) -> Iterator[tuple[float, list[tuple[Claimed, Delivery]]]]:
        """Claims what may be claimed now, batch by batch: when it was asked for, and the rows that are ours. The others
        that were asked for are ended, held by somebody or too long: dropped; what is due of them is sent again."""
        if not self._offers:
            return
        waiting = {id(ticket): ticket for ticket in self._offers.take()}
        try:
            chosen, with_suspect = self._choose(list(waiting.values()), moment)
            for first in range(0, len(chosen), CLAIM_BATCH):
                tickets, sent_s = chosen[first : first + CLAIM_BATCH], lease_clock_s()
                unclaimed = {ticket.job_id: ticket for ticket in tickets}
                rows = self._claim(list(unclaimed), identity, moment, with_suspect)
                mine = [(row, unclaimed.pop(str(row.job_id))) for row in rows]
                claimed = {id(ticket) for _, ticket in mine}
                for ticket in tickets:
                    del waiting[id(ticket)]
                    if id(ticket) not in claimed:
                        ticket.drop()
                yield sent_s, mine
        finally:
            self._offers.put_back(waiting.values())

    def return_unread(self) -> None:
        """At shutdown: what waits is sent to another head at once."""
        self._offers.again()
        if not self._offers:
            return
        tickets = self._offers.take()
        try:
            with self._database.begin() as connection:
                outbox.unstamp(connection, [UUID(ticket.job_id) for ticket in tickets])
        except BaseException:
            self._offers.put_back(tickets)
            raise
        for ticket in tickets:
            ticket.drop()

    def _choose(self, tickets: Sequence[Delivery], moment: Moment) -> tuple[list[Delivery], bool]:
        """Those to claim now, and whether they are a suspect, alone."""
        with self._database.begin() as connection:
            found = crashes.quarantined(connection, [ticket.job_id for ticket in tickets])
        suspects = [str(job_id) for job_id in found]
        chosen = claimable(tickets, suspects, self._seats, moment)
        return chosen, any(ticket.job_id in suspects for ticket in chosen)

    def _claim(self, ids: Sequence[str], identity: Identity, moment: Moment, with_suspect: bool) -> list[Claimed]:
        """Between the choice and this an engine may have died under one of them elsewhere: then it is not taken with
        the others, but comes again as a suspect."""
        failpoint(Point.BEFORE_CLAIM)
        with self._database.begin() as connection:
            claimed = claims.claim(
                connection,
                ids,
                worker=identity.worker,
                pipeline=identity.pipeline,
                epoch=identity.epoch,
                fingerprint=identity.fingerprint,
                exactness=identity.exactness,
                lease_s=self._times.lease_s,
                exact_wait_s=self._times.exact_wait_s,
                with_quarantined=with_suspect,
            )
            if parked := without_room(claimed, moment.live, identity.kv_tokens // BLOCK_TOKENS):
                claims.park(connection, parked)
            if others := set(ids) - {str(row.job_id) for row in claimed}:
                self._postpone_too_long(connection, others, identity)
        if claimed:
            failpoint(Point.AFTER_CLAIM)
        return [replace(row, parked=(row.job_id, row.fence) in parked) for row in claimed]

    def _postpone_too_long(self, connection: Connection, ids: set[str], identity: Identity) -> None:
        wait_s = self._times.resend_s
        for job_id in claims.postpone_too_long(connection, ids, pipeline=identity.pipeline, wait_s=wait_s):
            log.warning(
                "a job is too long for this pipeline's KV: it waits for a larger one",
                job_id=str(job_id),
                kv_tokens=identity.kv_tokens,
                sent_again_after_s=wait_s,
            )
