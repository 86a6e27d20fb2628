"""Answers on their way to a caller: in pieces, and counted until they are sent. Knows no route.

An answer that is written at once waits in the connection's buffer, where nothing counts it and its
request has ended. In pieces it waits here, within the limits of requests, for as long as the reader
takes `write_timeout_s` for none of them.
"""

from __future__ import annotations

from starlette.types import Message, Receive, Scope, Send

from services.gateway import errors
from shardline.base.errors import Overload

PIECE_BYTES = 64 << 10
"""Of an answer, written at a time. Smaller answers are not counted."""

RETRY_AFTER_S = 1.0


class UnsentAnswers:
    """The bytes of large answers that are being sent, all together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Count more bytes. Raises Overload."""
        if self._num_bytes + num_bytes > self._max_bytes:
            raise Overload("too many large answers are being sent", RETRY_AFTER_S)
        self._num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """These bytes were sent, or their reader left."""
        self._num_bytes -= num_bytes


class AnswerSender:
    """Sends the answer to one request. Call `close` when the request ends."""

    def __init__(self, unsent: UnsentAnswers, scope: Scope, receive: Receive, send: Send) -> None:
        self._unsent = unsent
        self._scope = scope
        self._receive = receive
        self._send = send
        self._num_counted = 0
        self._is_refused = False

    async def __call__(self, message: Message) -> None:
        """Send a message of ASGI. An answer of known length for which there is no room is replaced
        by 429; for a part of a stream it raises Overload, before any of it was sent."""
        if self._is_refused:
            return
        if message["type"] == "http.response.start":
            await self._begin(message)
        else:
            await self._go_on(message)

    def close(self) -> None:
        """Give back what the answer took."""
        self._unsent.give_back(self._num_counted)
        self._num_counted = 0

    async def _begin(self, message: Message) -> None:
        length = int(
            next((value for name, value in message["headers"] if name == b"content-length"), b"0")
        )
        try:
            self._count(length)
        except Overload as error:
            self._is_refused = True
            await errors.respond(error)(self._scope, self._receive, self._send)
        else:
            await self._send(message)

    async def _go_on(self, message: Message) -> None:
        body = memoryview(message.get("body", b""))
        if len(body) <= PIECE_BYTES:
            await self._send(message)
            return
        is_streamed = self._num_counted == 0
        if is_streamed:
            self._count(len(body))
        for start in range(0, len(body), PIECE_BYTES):
            end = start + PIECE_BYTES
            more_body = end < len(body) or message.get("more_body", False)
            await self._send(
                {"type": message["type"], "body": bytes(body[start:end]), "more_body": more_body}
            )
        if is_streamed:
            self.close()

    def _count(self, num_bytes: int) -> None:
        if num_bytes > PIECE_BYTES:
            self._unsent.take(num_bytes)
            self._num_counted += num_bytes
