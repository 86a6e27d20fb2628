"""Fires schedules as their times come. The rules are in shardline_server.store.due_schedules."""

from __future__ import annotations

import structlog

from services.relay.loop import Loop, LoopContext
from shardline_server.failpoints import Point, failpoint
from shardline_server.store import due_schedules

log = structlog.get_logger(__name__)

MAX_FIRED = 128
"""In a turn, each in a separate transaction."""


class ScheduleKeeper(Loop):
    """Every relay looks once in a poll, and skips rows that another one has locked."""

    def __init__(self, context: LoopContext) -> None:
        super().__init__("schedules", context.metrics.errors)
        self._database = context.database
        self._poll_s = context.times.poll_s
        self._metrics = context.metrics

    def turn(self) -> float:
        """See to what is due."""
        held_up: set[str] = set()
        for _ in range(MAX_FIRED):
            with self._database.begin() as connection:
                fired = due_schedules.fire_next(connection, held_up=held_up)
                if fired is not None:
                    failpoint(Point.SCHEDULE_FIRED)
            if fired is None:
                return self._poll_s
            if fired.outcome == "held_up":
                held_up.add(fired.tenant)
            self._metrics.schedules.labels(outcome=fired.outcome).inc()
            if fired.error is not None:
                problem = {"schedule": fired.name, "problem": fired.error}
                log.warning("a schedule did not fire", outcome=fired.outcome, **problem)
        return 0.0
