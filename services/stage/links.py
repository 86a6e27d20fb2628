"""The links of a worker's machine to those of its fleet: it answers others that measure them, and measures its own."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from services.stage.hop.echo import Echo, measure_link
from services.stage.hop_sockets import hop_sockets
from services.stage.profiling import boot_id
from services.stage.settings import StageSettings
from shardline.errors import LinkLost
from shardline.planner import Link
from shardline.store.fleets import Echoing

log = structlog.get_logger(__name__)


class Links:
    """Answers from now on, in a thread of its own."""

    def __init__(self, settings: StageSettings) -> None:
        """Raises Invalid, or Unavailable if no address is free."""
        self._sockets = hop_sockets(settings)
        echo = Echo(self._sockets)
        self.own = Echoing(machine=boot_id(), address=echo.address)
        echo.start()

    def measure(self, others: Sequence[Echoing]) -> dict[str, Link]:
        """Returns the link to each machine that answers: a second for each at most, if none is slow to answer."""
        found: dict[str, Link] = {}
        for other in others:
            try:
                found[other.machine] = link = measure_link(self._sockets, other.address)
            except LinkLost as error:
                log.warning("a link is not measured: plans take it for a fast one", problem=str(error))
                continue
            milliseconds, rate = round(link.latency_s * 1e3, 3), round(link.bytes_per_s / 1e6)
            log.info("link measured", address=other.address, latency_ms=milliseconds, mb_per_s=rate)
        return found
