"""Serves and stops one gateway. After the drain time, callers without an answer learn that their
jobs continue."""

from __future__ import annotations

import asyncio
import math
import resource
import socket
from functools import partial
from typing import Any, cast

import structlog
import uvicorn

from services.gateway.app import create_app
from services.gateway.context import Gateway
from services.gateway.http.connections import ConnectionLimits, ConnectionRegister
from services.gateway.http.http_protocol import HttpConnection
from services.gateway.settings import GatewaySettings

log = structlog.get_logger(__name__)

BACKLOG = 1024
"""Connections that may wait to be accepted. All of them can be accepted before the first is
counted."""

FILES_BESIDE = 128
"""Open files other than callers: connections to Postgres and Redis, sockets that listen,
libraries."""

LAST_WORDS_S = 10.0
"""From the end of the drain time until all that still runs is cancelled. Both must fit Compose's
grace period."""


def raise_file_limit(settings: GatewaySettings) -> None:
    """Raise the limit of open files to the gateway's own limits: each connection is one, and shells
    usually allow 1,024."""
    wanted = settings.http_max_connections + BACKLOG + FILES_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < wanted:
        room = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (room, hard))
        if room < wanted:
            remedy = (
                "raise the hard limit (ulimit -Hn, LimitNOFILE=), "
                "or lower SHARDLINE_HTTP_MAX_CONNECTIONS"
            )
            log.warning(
                "limit of open files is below the limit of connections",
                files=room,
                wanted=wanted,
                remedy=remedy,
            )


def max_connections(settings: GatewaySettings) -> int:
    """Returns the limit of connections: the setting's, or fewer if the limit of open files is
    lower."""
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files == resource.RLIM_INFINITY:
        return settings.http_max_connections
    return max(1, min(settings.http_max_connections, num_files - FILES_BESIDE - backlog(num_files)))


def backlog(num_files: int) -> int:
    """Returns the connections that may wait to be accepted by a process with `num_files` files."""
    return max(1, min(BACKLOG, num_files // 4))


class GatewayServer(uvicorn.Server):
    """One gateway on one port, until it is asked to stop."""

    def __init__(self, settings: GatewaySettings, **options: Any) -> None:
        self._drain_s = settings.times.drain_s
        self._app = create_app(settings)
        self._register = ConnectionRegister(
            ConnectionLimits(
                max_open=max_connections(settings),
                head_timeout_s=settings.http_head_timeout_s,
                write_timeout_s=settings.http_write_timeout_s,
            )
        )
        connection = partial(
            HttpConnection, register=self._register, max_head_bytes=settings.http_max_head_bytes
        )
        config = uvicorn.Config(
            self._app,
            host=settings.http_host,
            port=settings.http_port,
            # uvicorn only calls it.
            http=cast(type[asyncio.Protocol], connection),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=backlog(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
            timeout_keep_alive=math.ceil(settings.http_idle_timeout_s),
            timeout_graceful_shutdown=math.ceil(self._drain_s + LAST_WORDS_S),
            **options,
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and begin to close the connections that are overdue."""
        await super().startup(sockets)
        metrics = self._gateway.metrics
        metrics.connections.set_function(lambda: len(self._register))
        self._register.start(lambda reason: metrics.connections_closed.labels(reason).inc())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new connections; requests without an answer after the drain time get 503."""
        over = asyncio.get_running_loop().call_later(self._drain_s, self._gateway.stopping.set)
        try:
            await super().shutdown(sockets)
        finally:
            over.cancel()
            self._register.stop()

    @property
    def _gateway(self) -> Gateway:
        """Made when the application starts."""
        gateway = self._app.state.gateway
        assert isinstance(gateway, Gateway)
        return gateway
