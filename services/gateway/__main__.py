"""`python -m services.gateway`: one gateway process until SIGTERM, which lets answers under way end."""

from __future__ import annotations

import math

import structlog
import uvicorn

from services.gateway.app import create_app
from services.gateway.settings import GatewaySettings
from shardline import log


def main() -> None:
    """Serve until told to stop."""
    settings = GatewaySettings()
    log.configure(service="gateway", level=settings.log_level, form=settings.log_format)
    structlog.get_logger(__name__).info("gateway starts", host=settings.http_host, port=settings.http_port)
    uvicorn.run(
        create_app(settings),
        host=settings.http_host,
        port=settings.http_port,
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=2048,
        timeout_graceful_shutdown=math.ceil(settings.times.drain_s),
    )


if __name__ == "__main__":
    main()
