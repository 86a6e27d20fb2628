"""A worker's links to the others of its fleet: it answers who measures them or copies a model, and
measures its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

from services.stage.device.machine import boot_id
from services.stage.fleet.peer import measure_link
from services.stage.fleet.peer_server import PeerServer
from services.stage.hop_sockets import hop_sockets
from services.stage.model.model_info import model_files
from services.stage.settings import StageSettings
from shardline.base.errors import LinkLost
from shardline.store.fleets import PeerAddress
from shardline_costs import Link

log = structlog.get_logger(__name__)


class Links:
    """Answers peers from now on, in its own thread."""

    def __init__(self, settings: StageSettings, folders: Mapping[str, Path]) -> None:
        """`folders` are those of the models, by name. Raises Invalid, or Unavailable if no address
        is free."""
        self._sockets = hop_sockets(settings)
        server = PeerServer(
            self._sockets, {name: model_files(folder) for name, folder in folders.items()}
        )
        self.own = PeerAddress(machine=boot_id(), address=server.address)
        server.start()

    def measure(self, others: Sequence[PeerAddress]) -> dict[str, Link]:
        """Returns the link to each machine that answers: a second for each at most, if none is slow
        to answer."""
        found: dict[str, Link] = {}
        for other in others:
            try:
                found[other.machine] = link = measure_link(self._sockets, other.address)
            except LinkLost as error:
                log.warning(
                    "a link is not measured: plans take it for a fast one", problem=str(error)
                )
                continue
            milliseconds = round(link.latency_s * 1e3, 3)
            rate = round(link.bytes_per_s / 1e6)
            log.info("link measured", address=other.address, latency_ms=milliseconds, mb_per_s=rate)
        return found
