"""The sockets of a stage's hops and control links, by its settings. Opens none."""

from __future__ import annotations

import structlog

from services.stage.hop.sockets import CurveKeys, Sockets, parse_ports
from services.stage.settings import StageSettings
from shardline.base.errors import Invalid

log = structlog.get_logger(__name__)


def hop_sockets(settings: StageSettings) -> Sockets:
    """Returns the sockets. Over ipc the folder keeps strangers out, over tcp the key does. Raises
    Invalid."""
    if settings.hop_transport == "ipc":
        return Sockets(bind=f"ipc://{settings.run_dir.absolute()}")
    ports = parse_ports(settings.hop_ports)
    curve = _curve(settings)
    return Sockets(
        bind=f"tcp://{settings.hop_bind}", advertise=settings.hop_host, ports=ports, curve=curve
    )


def _curve(settings: StageSettings) -> CurveKeys | None:
    if settings.hop_insecure:
        log.warning("hops are open to whoever reaches this stage: SHARDLINE_HOP_INSECURE is set")
        return None
    if settings.hop_secret_key is None:
        raise Invalid(
            "SHARDLINE_HOP_SECRET_KEY",
            "hops over tcp need a key",
            "Make one (openssl rand -hex 32) and give the same one to all stages; "
            "or set SHARDLINE_HOP_INSECURE=true where no other host reaches them",
        )
    return CurveKeys.of(settings.hop_secret_key.get_secret_value())
