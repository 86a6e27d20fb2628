"""The sweeper: expired leases, passed deadlines, cancels of waiting jobs. The rules are in shardline.store.sweeps."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping
from uuid import UUID

import structlog
from sqlalchemy import Engine

from services.relay.loop import POSTGRES_ERRORS, Loop
from services.relay.models import Decoder
from services.relay.results import Results
from shardline.config import Times
from shardline.metrics import RelayMetrics
from shardline.store import sweeps

log = structlog.get_logger(__name__)

COUNT_EVERY = 30
"""Turns between two counts of the jobs that wait and run."""


class Sweeper(Loop):
    """After Postgres was away, heads have one lease to beat again before the first rescue."""

    def __init__(self, *, database: Engine, results: Results, times: Times, metrics: RelayMetrics) -> None:
        super().__init__("sweeper", metrics.errors)
        self._results = results
        self._database = database
        self._times = times
        self._metrics = metrics
        self._decode = Decoder(database)
        self._rescue_after_s = 0.0
        self._num_turns = 0

    def turn(self) -> float:
        """Both sweeps."""
        try:
            num_moved = self._sweep()
        except POSTGRES_ERRORS:
            self._rescue_after_s = math.inf
            raise
        return 0.0 if num_moved >= sweeps.MAX_BATCH else self._times.poll_s

    def _sweep(self) -> int:
        with self._database.begin() as connection:
            moved = sweeps.sweep_waiting(connection, self._decode)
        num_moved = self._record(moved)
        now_s = time.monotonic()
        if self._rescue_after_s == math.inf:
            self._rescue_after_s = now_s + self._times.lease_s
        if now_s >= self._rescue_after_s:
            with self._database.begin() as connection:
                moved = sweeps.sweep_leases(connection, self._decode, lease_s=self._times.lease_s)
            num_moved += self._record(moved)
        self._count()
        return num_moved

    def _record(self, moved: Mapping[UUID, str]) -> int:
        """At once after COMMIT: whatever fails next, this has happened."""
        self._results.note(moved)
        counts = Counter(map(str, moved.values()))
        for outcome, number in counts.items():
            self._metrics.swept.labels(outcome=outcome).inc(number)
        if counts:
            log.info("swept", **counts)
        return len(moved)

    def _count(self) -> None:
        self._num_turns += 1
        if self._num_turns % COUNT_EVERY != 1:
            return
        with self._database.begin() as connection:
            counts = sweeps.counts(connection)
        self._metrics.jobs.clear()
        for (model, state), number in counts.items():
            self._metrics.jobs.labels(model=model, state=state).set(number)
