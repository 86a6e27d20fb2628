"""The sweeper: expired leases, passed deadlines, cancels of waiting jobs. The rules are in
shardline_server.store.sweeps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from uuid import UUID

import structlog
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from services.relay.celery.celery_results import CeleryResults
from services.relay.loop import POSTGRES_ERRORS, STALL, Loop, LoopContext
from services.relay.partial_texts import PartialTexts
from shardline.base.clock import lease_clock_s
from shardline.store.connection.database import failure_of
from shardline_server.store import sweeps

log = structlog.get_logger(__name__)


class Sweeper(Loop):
    """Runs both sweeps. After an outage or stall of Postgres it lets heads renew for one lease
    first."""

    def __init__(self, context: LoopContext, *, results: CeleryResults) -> None:
        super().__init__("sweeper", context.metrics.errors)
        self._results = results
        self._database = context.database
        self._times = context.times
        self._limits = context.limits
        self._metrics = context.metrics
        self._spans = context.spans
        self._partial_texts = PartialTexts(context.database, budget_s=context.times.poll_s)
        self._rescue_after_s = 0.0
        self._answered_s = math.inf
        """The last answer of Postgres; or the first turn, before which nothing is known."""

    def turn(self) -> float:
        """Make the texts that the last sweeps lacked, then sweep. What Postgres refuses of one of
        these keeps no other from its turn."""
        self._answered_s = min(self._answered_s, lease_clock_s())
        num_moved = 0
        refused: DBAPIError | None = None
        for part in (self._make_texts, self._end_waiting, self._rescue):
            try:
                num_moved += part()
            except POSTGRES_ERRORS as error:
                if not isinstance(error, DBAPIError) or failure_of(error).is_lost:
                    self._rescue_after_s = math.inf
                    raise
                refused = error
        if refused is not None:
            raise refused
        return (
            0.0
            if self._partial_texts.was_asked or num_moved >= sweeps.MAX_BATCH
            else self._times.poll_s
        )

    def _make_texts(self) -> int:
        self._partial_texts.catch_up()
        return 0

    def _end_waiting(self) -> int:
        with self._database.begin() as connection:
            moved = sweeps.sweep_stopped_queued(connection, self._partial_texts)
        self._note_answer()
        self._record(moved)
        self._spans.ended(moved)
        return len(moved)

    def _rescue(self) -> int:
        moved: dict[UUID, str] = {}
        with self._database.begin() as connection:
            # A stall after this moment ends no lease too early: they are judged by it.
            self._fix_now(connection)
            now_s = self._note_answer()
            if now_s >= self._rescue_after_s:
                moved = sweeps.sweep_expired_leases(
                    connection,
                    self._partial_texts,
                    lease_s=self._times.lease_s,
                    limits=self._limits,
                )
        self._record(moved)
        self._spans.rescued(moved)
        return len(moved)

    def _fix_now(self, connection: Connection) -> None:
        """Fixes the time. Heads wait for the tables too: where that takes too long for Postgres,
        they may have waited for as long."""
        try:
            sweeps.fix_now(connection)
        except POSTGRES_ERRORS:
            self._rescue_after_s = math.inf
            raise

    def _note_answer(self) -> float:
        now_s = lease_clock_s()
        silent_s = now_s - self._answered_s
        if silent_s > STALL * self._times.lease_s:
            log.warning(
                "postgres stalled: no lease expires for one lease", silent_s=round(silent_s, 1)
            )
            self._rescue_after_s = math.inf
        if self._rescue_after_s == math.inf:
            self._rescue_after_s = now_s + self._times.lease_s
        self._answered_s = now_s
        return now_s

    def _record(self, moved: Mapping[UUID, str]) -> None:
        """Record moves right after COMMIT: whatever fails next, they have happened."""
        self._results.note(moved)
        counts = Counter(map(str, moved.values()))
        for outcome, number in counts.items():
            self._metrics.swept.labels(outcome=outcome).inc(number)
        for job_id, outcome in moved.items():
            tell = log.warning if outcome in ("crashed", "failed") else log.info
            tell("job swept", job_id=str(job_id), outcome=str(outcome))
