"""Counts jobs and workers for gauges. Apart from the sweeper: counting a long backlog delays no
rescue."""

from __future__ import annotations

from services.relay.loop import Loop, LoopContext
from shardline.store import fleets
from shardline.store.statistics.demand import oldest_queued
from shardline_server.store import sweeps

TURNS_APART = 30
"""Polls between two counts."""

Labels = tuple[str, str]


class JobCounts(Loop):
    """Every relay counts the same rows."""

    def __init__(self, context: LoopContext) -> None:
        super().__init__("job-counts", context.metrics.errors)
        self._database = context.database
        self._pause_s = TURNS_APART * context.times.poll_s
        self._metrics = context.metrics
        self._shown: set[Labels] = set()

    def turn(self) -> float:
        """Count once. Labels without jobs show 0: a gauge that vanishes would look like a dead
        relay."""
        with self._database.begin() as connection:
            counts = sweeps.count_active(connection)
            waits = oldest_queued(connection)
            workers = {
                model: len(fleets.workers_of(connection, model))
                for model in fleets.fleets(connection)
            }
            plans = fleets.all_plans(connection)
        self._shown |= counts.keys()
        for model, state in self._shown:
            self._metrics.jobs.labels(model=model, state=state).set(counts.get((model, state), 0))
        for model, seconds in waits.items():
            self._metrics.oldest_queued_seconds.labels(model=model).set(seconds)
        for model in {*workers, *plans}:
            self._metrics.fleet_workers.labels(model=model).set(workers.get(model, 0))
            tokens_per_s = plans[model].tokens_per_s if model in plans else None
            self._metrics.fleet_tokens_per_s.labels(model=model).set(tokens_per_s or 0)
        return self._pause_s
