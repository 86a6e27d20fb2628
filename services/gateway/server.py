"""How a gateway serves and stops: answers under way have the drain time, then each caller hears that they go on."""

from __future__ import annotations

import asyncio
import math
import resource
import socket
from typing import Any

import structlog
import uvicorn

from services.gateway.app import create_app
from services.gateway.context import Gateway
from services.gateway.settings import GatewaySettings

log = structlog.get_logger(__name__)

FILES_BESIDE = 128
"""Open files that are no caller's: connections to Postgres and Redis, sockets that listen, libraries."""

LAST_WORDS_S = 10.0
"""Between the last moment for answers and the cancelling of all that still runs. With the drain time it must fit
Compose's grace."""


def raise_file_limit(settings: GatewaySettings) -> None:
    """Each caller is an open file, and the usual limit of a shell, 1,024, is below the gateway's own limits."""
    wanted = settings.http_max_in_flight + settings.http_max_followers + FILES_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < wanted:
        room = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (room, hard))
        if room < wanted:
            remedy = "raise the hard limit (ulimit -Hn, LimitNOFILE=), or lower SHARDLINE_HTTP_MAX_FOLLOWERS"
            log.warning("more callers may come than files may be open", files=room, wanted=wanted, remedy=remedy)


class GatewayServer(uvicorn.Server):
    """One gateway on one port, until it is told to stop."""

    def __init__(self, settings: GatewaySettings, **options: Any) -> None:
        self._drain_s = settings.times.drain_s
        self._app = create_app(settings)
        config = uvicorn.Config(
            self._app,
            host=settings.http_host,
            port=settings.http_port,
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=2048,
            timeout_graceful_shutdown=math.ceil(self._drain_s + LAST_WORDS_S),
            **options,
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """No new connections; what is not answered in the drain time is answered with 503."""
        gateway: Gateway = self._app.state.gateway
        over = asyncio.get_running_loop().call_later(self._drain_s, gateway.stopping.set)
        try:
            await super().shutdown(sockets)
        finally:
            over.cancel()
