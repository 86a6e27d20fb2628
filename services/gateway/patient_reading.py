"""Reads the row of an ended job for a stream's reader, however long Postgres is away. Knows no form
of an answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from services.gateway.settings import GatewaySettings
from shardline.base.errors import Unavailable

Value = TypeVar("Value")

RETRY_S = 0.5


async def read_patiently(
    settings: GatewaySettings, read: Callable[[], Awaitable[Value]], *, failure: str
) -> AsyncIterator[Value | None]:
    """What `read` returns, once. While it raises Unavailable or is silent it is retried for
    `http_end_wait_s`; gives None meanwhile, as often as a reader wants a sign of life. A query that
    waits for its turn keeps it. Raises Unavailable with `failure`."""
    wait_s = settings.http_end_wait_s
    deadline_s = time.monotonic() + wait_s
    reading = asyncio.ensure_future(read())
    try:
        while (left_s := deadline_s - time.monotonic()) > 0:
            await asyncio.wait({reading}, timeout=min(left_s, settings.http_keep_alive_s))
            if reading.done() and not isinstance(reading.exception(), Unavailable):
                yield reading.result()
                return
            yield None
            if reading.done():
                await asyncio.sleep(min(RETRY_S, wait_s))
                reading = asyncio.ensure_future(read())
    finally:
        reading.cancel()
    raise Unavailable(f"Postgres did not answer within {wait_s:g} s. {failure}")
