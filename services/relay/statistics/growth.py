"""Warns of growth: ended jobs without retention, dead letters, dead rows. Deletes nothing.

Also folds changes of quotas, which would pile up without submits."""

from __future__ import annotations

import structlog

from services.relay.loop import Loop, LoopContext
from shardline.store.tenants.quotas import fold_quotas
from shardline_server.store import growth

log = structlog.get_logger(__name__)

TURNS_APART = 60
"""Polls between two checks."""

KEPT_BYTES = 1 << 30
KEPT_DEAD = 1_000
DEAD_ROWS = 1_000_000
"""Sizes from which on there is a warning, and another one at each doubling."""


class DoublingThreshold:
    """True at `first`, and whenever it has doubled since."""

    def __init__(self, first: int) -> None:
        self._next = first

    def reached(self, value: int) -> bool:
        """Whether to warn about this value."""
        if value < self._next:
            return False
        self._next = 2 * value
        return True


class Growth(Loop):
    """Every relay checks the same tables."""

    def __init__(self, context: LoopContext, *, keeps_all: bool) -> None:
        super().__init__("growth", context.metrics.errors)
        self._database = context.database
        self._keeps_all = keeps_all
        self._metrics = context.metrics
        self._pause_s = TURNS_APART * context.times.poll_s
        self._bytes = DoublingThreshold(KEPT_BYTES)
        self._dead = DoublingThreshold(KEPT_DEAD)
        self._dead_rows = DoublingThreshold(DEAD_ROWS)

    def turn(self) -> float:
        """Check once."""
        with self._database.begin() as connection:
            sizes = growth.sizes(connection)
            num_dead = growth.num_dead(connection)
        with self._database.begin() as connection:
            fold_quotas(connection)
        for name, size in sizes.items():
            self._metrics.table_bytes.labels(table=name).set(size.num_bytes)
            self._metrics.dead_rows.labels(table=name).set(size.num_dead_rows)
        self._metrics.dead_letters.set(num_dead)
        self._warn(
            sum(size.num_bytes for size in sizes.values()),
            sum(size.num_dead_rows for size in sizes.values()),
            num_dead,
        )
        return self._pause_s

    def _warn(self, total_bytes: int, num_dead_rows: int, num_dead: int) -> None:
        if self._keeps_all and self._bytes.reached(total_bytes):
            log.warning(
                "ended jobs are kept for ever: "
                "set SHARDLINE_RETENTION_DAYS on the relays, or watch the disk",
                table_gib=round(total_bytes / 2**30, 1),
            )
        if self._dead.reached(num_dead):
            log.warning(
                "dead letters pile up, and no retention deletes them: shardline dead list, "
                "then replay or delete them",
                dead_letters=num_dead,
            )
        if self._dead_rows.reached(num_dead_rows):
            log.warning(
                "old versions of rows pile up, and heartbeats read them all: "
                "end the transaction that has been open longest "
                "(a dump, a session idle in transaction, a replication slot)",
                dead_rows=num_dead_rows,
            )
