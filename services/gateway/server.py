"""Serves and stops one gateway. After the drain time, callers without an answer are told that their jobs continue."""

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
"""Open files besides callers: connections to Postgres and Redis, sockets that listen, libraries."""

LAST_WORDS_S = 10.0
"""From the end of the drain time until all that still runs is cancelled. Both must fit Compose's grace period."""


def raise_file_limit(settings: GatewaySettings) -> None:
    """Raise the limit of open files to the gateway's own limits: each caller is one, and shells usually allow 1,024."""
    wanted = settings.http_max_in_flight + settings.http_max_followers + FILES_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < wanted:
        room = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (room, hard))
        if room < wanted:
            remedy = "raise the hard limit (ulimit -Hn, LimitNOFILE=), or lower SHARDLINE_HTTP_MAX_FOLLOWERS"
            log.warning("limit of open files is below the limits of callers", files=room, wanted=wanted, remedy=remedy)


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
        """Refuse new connections; requests without an answer after the drain time get 503."""
        gateway: Gateway = self._app.state.gateway
        over = asyncio.get_running_loop().call_later(self._drain_s, gateway.stopping.set)
        try:
            await super().shutdown(sockets)
        finally:
            over.cancel()
