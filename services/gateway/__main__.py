"""`python -m services.gateway`: one gateway process until SIGTERM, after which answers in progress
finish."""

from __future__ import annotations

import signal
import sys

import structlog

from services.gateway.http.server import GatewayServer, raise_file_limit
from services.gateway.settings import GatewaySettings
from shardline.base import log
from shardline.store.connection.database_url import normalize
from shardline_server.refusals import refusing


def _stopped(_signal: int, _frame: object) -> None:
    sys.exit(0)


def main() -> None:
    """Serve until SIGTERM."""
    # uvicorn raises the signal again after its graceful end: that end is a success.
    signal.signal(signal.SIGTERM, _stopped)
    with refusing():
        settings = GatewaySettings()
        normalize(settings.database_url.get_secret_value())
    log.configure(service="gateway", level=settings.log_level, form=settings.log_format)
    structlog.get_logger(__name__).info(
        "gateway starting", host=settings.http_host, port=settings.http_port
    )
    raise_file_limit(settings)
    GatewayServer(settings).run()


if __name__ == "__main__":
    main()
