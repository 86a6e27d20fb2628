"""How many jobs wait and run, as a gauge. Apart from the sweeps: a count of a long backlog holds up no rescue."""

from __future__ import annotations

from sqlalchemy import Engine

from services.relay.loop import Loop
from shardline.config import Times
from shardline.metrics import RelayMetrics
from shardline.store import sweeps

TURNS_APART = 30
"""Polls between two counts."""

Labels = tuple[str, str]


class Census(Loop):
    """Every relay counts the same rows."""

    def __init__(self, *, database: Engine, times: Times, metrics: RelayMetrics) -> None:
        super().__init__("census", metrics.errors)
        self._database = database
        self._pause_s = TURNS_APART * times.poll_s
        self._gauge = metrics.jobs
        self._shown: set[Labels] = set()

    def turn(self) -> float:
        """One count. What has no jobs any more shows 0: a gauge that vanishes looks like a relay that is gone."""
        with self._database.begin() as connection:
            counts = sweeps.count_active(connection)
        self._shown |= counts.keys()
        for model, state in self._shown:
            self._gauge.labels(model=model, state=state).set(counts.get((model, state), 0))
        return self._pause_s
