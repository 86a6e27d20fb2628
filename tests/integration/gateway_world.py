"""A real gateway on a real port, in the test's own event loop, and readers of what it sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from services.gateway.app import create_app
from services.gateway.settings import GatewaySettings
from services.standalone.ports import free_port

PROMPT = "sum: 1 + 2 ="
COMMENT = "a comment"


@asynccontextmanager
async def running_gateway(database_url: str, redis_url: str, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway that answers."""
    values = {"database_url": database_url, "redis_url": redis_url, **settings}
    app = create_app(GatewaySettings(**values))
    config = uvicorn.Config(app, port=free_port(), log_config=None, access_log=False, timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    address = f"http://127.0.0.1:{config.port}"
    try:
        async with httpx.AsyncClient(base_url=address, timeout=60, limits=httpx.Limits(max_connections=64)) as client:
            await _until_it_answers(client, task)
            yield client
    finally:
        server.should_exit = True
        await task


async def _until_it_answers(client: httpx.AsyncClient, task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(30):
        while not task.done():
            try:
                await client.get("/health")
            except httpx.ConnectError:
                await asyncio.wait({task}, timeout=0.01)
            else:
                return
    task.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One server-sent event."""

    name: str | None
    event_id: str | None
    data: Any


async def events_of(response: httpx.Response, *, with_comments: bool = False) -> AsyncIterator[Event]:
    """Events by the rules of the format; `[DONE]` stays text."""
    fields: dict[str, str] = {}
    async for line in response.aiter_lines():
        if line.startswith(":") and with_comments:
            yield Event(name=COMMENT, event_id=None, data=line)
        elif line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            if "data" in fields:
                data = fields["data"]
                yield Event(
                    name=fields.get("event"),
                    event_id=fields.get("id"),
                    data=data if data == "[DONE]" else json.loads(data),
                )
            fields = {}
