"""Deletes ended jobs after the retention period. What may be deleted is decided in shardline.store.retention."""

from __future__ import annotations

import structlog

from services.relay.loop import Loop, LoopContext
from shardline.store import retention

log = structlog.get_logger(__name__)

DAY_S = 86_400.0
TURNS_APART = 60
"""Polls between two checks, when nothing is left to delete."""


class Retention(Loop):
    """Deletes in small transactions, so that running jobs are not delayed."""

    def __init__(self, context: LoopContext, *, days: float) -> None:
        super().__init__("retention", context.metrics.errors)
        self._database = context.database
        self._age_s = days * DAY_S
        self._pause_s = TURNS_APART * context.times.poll_s
        self._metrics = context.metrics
        self._after: retention.Place | None = None

    def turn(self) -> float:
        """Delete one batch."""
        with self._database.begin() as connection:
            batch = retention.delete_old(connection, age_s=self._age_s, after=self._after)
        self._after = batch.after
        if batch.num_deleted:
            self._metrics.deleted.inc(batch.num_deleted)
            log.info("old jobs deleted", jobs=batch.num_deleted)
        return self._pause_s if batch.after is None else 0.0
