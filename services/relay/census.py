"""Counts queued and running jobs for a gauge. Apart from the sweeper: counting a long backlog delays no rescue."""

from __future__ import annotations

from services.relay.loop import Loop, LoopContext
from shardline.store import sweeps

TURNS_APART = 30
"""Polls between two counts."""

Labels = tuple[str, str]


class Census(Loop):
    """Every relay counts the same rows."""

    def __init__(self, context: LoopContext) -> None:
        super().__init__("census", context.metrics.errors)
        self._database = context.database
        self._pause_s = TURNS_APART * context.times.poll_s
        self._gauge = context.metrics.jobs
        self._shown: set[Labels] = set()

    def turn(self) -> float:
        """Count once. Labels without jobs show 0: a gauge that vanishes would look like a dead relay."""
        with self._database.begin() as connection:
            counts = sweeps.count_active(connection)
        self._shown |= counts.keys()
        for model, state in self._shown:
            self._gauge.labels(model=model, state=state).set(counts.get((model, state), 0))
        return self._pause_s
