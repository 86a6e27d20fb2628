"""Writes what energy costs into rows: the rates that the settings name, read again now and then.
Knows no job."""

from __future__ import annotations

from collections.abc import Mapping

import httpx
import structlog
from sqlalchemy.exc import OperationalError

from services.relay.loop import Loop, LoopContext
from services.relay.statistics.rate_series import read_rates
from shardline.base.errors import Invalid
from shardline.store.statistics import costs
from shardline.store.statistics.costs import RateKind

log = structlog.get_logger(__name__)

TURNS_APART = 900
"""Polls between two readings: series have an hour or a quarter of one between rates, and are
published a day ahead."""

MAX_TOLD = 200
"""Characters of an error: it may quote a page."""


class EnergyRates(Loop):
    """Every relay reads the same sources and writes the same rows."""

    def __init__(self, context: LoopContext, sources: Mapping[RateKind, str | None]) -> None:
        super().__init__("energy-rates", context.metrics.errors)
        self._database = context.database
        self._gauge = context.metrics.energy_rate
        self._sources = {kind: source for kind, source in sources.items() if source is not None}
        self._pause_s = TURNS_APART * context.times.poll_s

    def turn(self) -> float:
        """Read once. A source that cannot be read now leaves the rates as they are."""
        for kind, source in self._sources.items():
            try:
                self._read(kind, source)
            except OperationalError:
                raise
            except Exception as error:  # noqa: BLE001 (the other source is still read)
                log.warning("rates of energy cannot be read", kind=kind, error=_told(error))
        with self._database.begin() as connection:
            present = costs.present_rates(connection)
        for name, per_kwh in present.items():
            self._gauge.labels(kind=name).set(per_kwh)
        return self._pause_s

    def _read(self, kind: RateKind, source: str) -> None:
        rates = read_rates(source, f"SHARDLINE_ENERGY_{kind.upper()}")
        with self._database.begin() as connection:
            if isinstance(rates, float):
                num_changed = costs.put_fixed(connection, kind, rates)
            else:
                num_changed = costs.put_series(connection, kind, rates)
        if num_changed:
            log.info("rates of energy written", kind=kind, rates=num_changed)


def _told(error: Exception) -> str:
    """Without the source's address, which may hold a password or a token."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"it answers {error.response.status_code}"
    if isinstance(error, Invalid):
        return f"{error.problem[:MAX_TOLD]}. {error.remedy}"
    return (
        type(error).__name__
        if isinstance(error, httpx.HTTPError | httpx.InvalidURL)
        else str(error)[:MAX_TOLD]
    )
