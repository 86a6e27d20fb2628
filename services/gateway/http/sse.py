"""Server-sent events: their encoding, and a response that notices when its reader disconnects.
Knows no job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from shardline.base.aio import cancel_and_wait
from shardline.base.errors import Overload

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


BREAKS = {each.encode(): rb"\u%04x" % ord(each) for each in "\x85\u2028\u2029"}
"""Not breaks to the standard, but to `str.splitlines`, by which many clients read lines."""


def event(document: Any, *, name: str | None = None, event_id: str | None = None) -> bytes:
    """Encode one event; JSON has no line breaks, so one line of data holds it."""
    lines = [f"event: {name}\n"] if name else []
    if event_id is not None:
        lines.append(f"id: {event_id}\n")
    data = msgspec.json.encode(document)
    for character, escaped in BREAKS.items():
        data = data.replace(character, escaped)
    return "".join(lines).encode() + b"data: " + data + b"\n\n"


async def disconnected(request: Request) -> None:
    """Returns when the caller has gone. Its body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends `events` as they come. `on_disconnect` is awaited if the reader leaves before the end,
    and only then."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        headers: Mapping[str, str] | None = None,
        on_disconnect: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(headers={**HEADERS, **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._on_disconnect = on_disconnect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Two tasks: one sends, one waits for the reader to leave."""
        sending = asyncio.create_task(self._send_all(send))
        leaving = asyncio.create_task(disconnected(Request(scope, receive)))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            elif self._on_disconnect is not None:
                await self._on_disconnect()
        finally:
            for task in (sending, leaving):
                await cancel_and_wait(task)

    async def _send_all(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        async for chunk in self._events:
            try:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except Overload as error:
                # There is no room for this event: its maker knows what to send instead.
                last = await self._events.athrow(error)
                await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
