"""The sweeper: expired leases, passed deadlines, cancels of waiting jobs. The rules are in shardline.store.sweeps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from uuid import UUID

import structlog
from sqlalchemy import Engine

from services.relay.loop import POSTGRES_ERRORS, Loop
from services.relay.models import Decoder
from services.relay.results import Results
from shardline.clock import lease_clock_s
from shardline.config import Times
from shardline.metrics import RelayMetrics
from shardline.store import sweeps

log = structlog.get_logger(__name__)

STALL = 1 / 3
"""Of a lease: a Postgres that gave no answer for longer, or a relay that stood still, counts as having been away."""


class Sweeper(Loop):
    """After Postgres was away or stalled, heads have one lease to beat again before the first rescue."""

    def __init__(self, *, database: Engine, results: Results, times: Times, metrics: RelayMetrics) -> None:
        super().__init__("sweeper", metrics.errors)
        self._results = results
        self._database = database
        self._times = times
        self._metrics = metrics
        self._decoder = Decoder(database, budget_s=times.poll_s)
        self._rescue_after_s = 0.0
        self._answered_s = math.inf
        """The last answer of Postgres; or the first turn, before which nothing is known."""

    def turn(self) -> float:
        """What the last sweeps lacked, then both sweeps."""
        self._answered_s = min(self._answered_s, lease_clock_s())
        try:
            self._decoder.catch_up()
            num_moved = self._end_waiting() + self._rescue()
        except POSTGRES_ERRORS:
            self._rescue_after_s = math.inf
            raise
        return 0.0 if self._decoder.was_asked or num_moved >= sweeps.MAX_BATCH else self._times.poll_s

    def _end_waiting(self) -> int:
        with self._database.begin() as connection:
            moved = sweeps.sweep_stopped_queued(connection, self._decoder)
        self._note_answer()
        return self._record(moved)

    def _rescue(self) -> int:
        moved: dict[UUID, str] = {}
        with self._database.begin() as connection:
            # A stall after this moment ends no lease too early: they are judged by it.
            sweeps.fix_now(connection)
            now_s = self._note_answer()
            if now_s >= self._rescue_after_s:
                moved = sweeps.sweep_expired_leases(connection, self._decoder, lease_s=self._times.lease_s)
        return self._record(moved)

    def _note_answer(self) -> float:
        now_s = lease_clock_s()
        silent_s = now_s - self._answered_s
        if silent_s > STALL * self._times.lease_s:
            log.warning("Postgres stalled: no lease counts as expired for one lease", silent_s=round(silent_s, 1))
            self._rescue_after_s = math.inf
        if self._rescue_after_s == math.inf:
            self._rescue_after_s = now_s + self._times.lease_s
        self._answered_s = now_s
        return now_s

    def _record(self, moved: Mapping[UUID, str]) -> int:
        """At once after COMMIT: whatever fails next, this has happened."""
        self._results.note(moved)
        counts = Counter(map(str, moved.values()))
        for outcome, number in counts.items():
            self._metrics.swept.labels(outcome=outcome).inc(number)
        for job_id, outcome in moved.items():
            tell = log.warning if outcome in ("crashed", "failed") else log.info
            tell("job swept", job_id=str(job_id), outcome=str(outcome))
        return len(moved)
