"""Whether Postgres fails this head, and what was logged of it. Knows no statement."""

from __future__ import annotations

import structlog

from shardline.base.clock import monotonic_s
from shardline.store.connection.database import Failure

log = structlog.get_logger(__name__)


class Outage:
    """Each kind of failure is logged once, and the end of all of them."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._logged: set[str | None] = set()
        """SQLSTATEs."""

    @property
    def is_on(self) -> bool:
        """The last statement failed."""
        return self._since_s is not None

    def begin(self, failure: Failure) -> None:
        """A transaction failed; it will be tried again."""
        if self._since_s is None:
            self._since_s = monotonic_s()
        if failure.sqlstate not in self._logged:
            self._logged.add(failure.sqlstate)
            write = log.warning if failure.is_lost else log.error
            what = "postgres unreachable" if failure.is_lost else "Postgres refuses a statement"
            write(
                f"{what}: claiming paused, results kept",
                sqlstate=failure.sqlstate,
                error=failure.problem,
            )

    def end(self) -> None:
        """A whole turn succeeded."""
        if self._since_s is not None:
            log.info("Postgres works again", outage_s=round(monotonic_s() - self._since_s, 1))
            self._since_s = None
            self._logged.clear()
