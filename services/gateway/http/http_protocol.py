"""HTTP/1.1 on one connection: uvicorn's protocol over httptools, with the limits that it lacks.
Knows no route.

uvicorn bounds neither a request's head nor the time for it, forgets the request under way when
another one is pipelined behind it, drops the body of a request that offers another protocol
(h2c), and sends streams in chunks to who speaks HTTP/1.0, which has none. h11 has the limits, and
costs a tenth of the accepted jobs per second.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from services.gateway.errors import (
    HeadTooLarge,
    MalformedRequest,
    TooSlow,
    advice,
    body_of,
    status_of,
)
from services.gateway.http.connections import ConnectionRegister
from shardline.base.errors import Invalid
from shardline.contract.ids import new_id

MAX_HEADERS = 256
"""Lines of one head. Each costs Python about 140 bytes, however short."""

MAX_PIECE_BYTES = 16 << 10
"""What the parser is given at a time: so much a head may be over its limit before it is refused."""

MAX_PIPELINED = 16
"""Requests that may wait behind the one under way, and ..."""

MAX_PIPELINED_BYTES = 16 << 10
"""... bytes of them, kept in memory."""

MAX_DROPPED_BYTES = 256 << 10
"""Read and dropped behind a refusal, so that the client is still there to read it."""

MAX_UNWANTED_BODY_BYTES = 32 << 20
"""The same of a body that came after its request was answered."""


class StopParsing(Exception):
    """Stops the parser in one of its callbacks."""


class HttpConnection(HttpToolsProtocol):
    """One connection of a caller. All calls come from the event loop."""

    def __init__(
        self, *arguments: Any, register: ConnectionRegister, max_head_bytes: int, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._register = register
        self._max_head_bytes = max_head_bytes
        self._unanswered: deque[RequestResponseCycle] = deque()
        """Requests without a complete answer, the one under way first."""
        self._num_head_bytes = 0
        """Of the head or the trailers that are being parsed."""
        self._num_unparsed_bytes = 0
        """Given to the parser since it last reported a head or a part of a body."""
        self._pipelined = b""
        """What came behind the request under way."""
        self._num_dropped_bytes = 0
        self._is_head_too_large = False
        self._is_in_head = True
        self._is_offer = False
        """This head offers another protocol, and is parsed again without the offer."""
        self._is_ending = False
        """Nothing more is parsed: the connection closes after the last answer."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if not self._register.opened(self):
            self._is_ending = True
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request of this connection, not only the newest, that its caller has gone."""
        self._register.closed(self)
        self._unset_keepalive_if_required()
        self._pipelined = b""
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what belongs to the present request, and keep a little of what comes behind it."""
        if self._is_ending:
            self._drop(len(data), MAX_DROPPED_BYTES)
        elif self._is_answering():
            self._keep(data)
        else:
            self._parse(data)

    def pause_writing(self) -> None:
        """The reader takes nothing: it has `write_timeout_s`."""
        self._register.writing.add(self)
        super().pause_writing()

    def resume_writing(self) -> None:
        """The reader has taken what was in the buffer."""
        self._register.writing.discard(self)
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """No further request came in time."""
        super().timeout_keep_alive_handler()
        self._register.writing.add(self)

    def expire_head(self) -> None:
        """The head of a request did not come in time. Who has sent nothing at all is not
        answered."""
        if self._is_ending or self._num_unparsed_bytes == 0:
            self.abort()
        else:
            problem = "its URL and headers did not arrive in time"
            self._refuse(TooSlow("request", problem, "Send it again"))

    def abort(self) -> None:
        """Close at once, and drop what was not sent."""
        self.transport.abort()

    # Callbacks of the parser
    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise StopParsing
        super().on_message_begin()
        self._num_head_bytes = 0
        self._is_offer = False
        if not self._unanswered:
            self._unset_keepalive_if_required()
            self._register.idle.discard(self)
            self._register.heads.add(self)

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + len(b": \r\n"))
        if len(self.headers) >= MAX_HEADERS:
            self._is_head_too_large = True
            raise StopParsing
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._num_unparsed_bytes = self._num_dropped_bytes = 0
        self._is_in_head = False
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise StopParsing
            self._is_offer = True
            return
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            _send_unframed(self.cycle)
        self._unanswered.append(self.cycle)
        self._register.heads.discard(self)
        # uvicorn stops to read when a request is pipelined, and would not see its caller leave.
        self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._num_unparsed_bytes = 0
        if self.cycle.response_complete:
            self._drop(len(body), MAX_UNWANTED_BODY_BYTES)
        elif self.pipeline and len(self.cycle.body) + len(body) > MAX_PIPELINED_BYTES:
            raise StopParsing
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_head = True
        if not self._is_offer:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Go on with what came behind the request that was answered."""
        self._unanswered.popleft()
        super().on_response_complete()
        if self._unanswered:
            return
        self._register.idle.add(self)
        if self.transport.is_closing():
            self._register.writing.add(self)
        elif self._pipelined:
            data = self._pipelined
            self._pipelined = b""
            self._parse(data)

    def _is_answering(self) -> bool:
        """Whether the newest request came whole and has no answer: what comes is a later one."""
        return bool(self._unanswered) and not self._unanswered[-1].more_body

    def _parse(self, data: bytes) -> None:
        whole = memoryview(data)
        start = 0
        while start < len(data) and not self._is_ending:
            if self._is_answering():
                self._keep(data[start:])
                return
            end = self._end_of_piece(data, start)
            self._parse_piece(whole[start:end])
            start = end

    def _end_of_piece(self, data: bytes, start: int) -> int:
        """A head is parsed alone, so that what is pipelined behind it is kept as it came."""
        end = start + MAX_PIECE_BYTES
        end_of_head = data.find(b"\r\n\r\n", start, end) if self._is_in_head else -1
        return end if end_of_head < 0 else end_of_head + 4

    def _parse_piece(self, piece: memoryview) -> None:
        self._num_unparsed_bytes += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as offer:
            self._parse_without_offer(bytes(piece[offer.args[0] :]))
        except httptools.HttpParserError:
            if self._is_head_too_large:
                self._refuse_head()
            else:
                self._refuse(
                    MalformedRequest("request", "it is not in HTTP/1.1", "Send it without TLS")
                )
        else:
            if self._num_unparsed_bytes > self._max_head_bytes:
                self._refuse_head()

    def _parse_without_offer(self, rest: bytes) -> None:
        """A server may ignore an offer to go on in another protocol, and answers in HTTP/1.1 then.

        The parser takes all behind such a head for that protocol, so that a new one gets the head
        without the line that makes the offer, and `rest`."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self._parse(b"\r\n".join([*lines, b"", b""]) + rest)

    def _count_head(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > self._max_head_bytes:
            self._is_head_too_large = True
            raise StopParsing

    def _keep(self, data: bytes) -> None:
        if len(self._pipelined) + len(data) > MAX_PIPELINED_BYTES:
            self._end_after_answers()
        else:
            self._pipelined += data

    def _end_after_answers(self) -> None:
        """Answer the requests that came whole, then close: the client may send the others again."""
        self._register.note_closed("pipelined")
        self._is_ending = True
        self._pipelined = b""
        self._unanswered[-1].keep_alive = False

    def _refuse_head(self) -> None:
        limits = f"{self._max_head_bytes} bytes, or over {MAX_HEADERS} lines"
        remedy = "Send fewer or shorter headers, and what is long in the body"
        self._refuse(HeadTooLarge("request", f"its URL and headers are over {limits}", remedy))

    def _refuse(self, error: Invalid) -> None:
        """Answer what is no request, and close. Behind a request under way nothing can be sent."""
        if self._is_answering():
            self._end_after_answers()
            return
        self._register.note_closed(body_of(error).error.code)
        self._is_ending = True
        if len(self._unanswered) > 1 or any(one.response_started for one in self._unanswered):
            self.abort()
            return
        for cycle in self._unanswered:
            # The rest of its body will not come.
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.write(_refusal(error))
        # Not closed yet: a connection that is closed with bytes unread is reset, its answer with
        # it.
        self.transport.write_eof()
        self._register.heads.add(self)

    def _drop(self, num_bytes: int, most_bytes: int) -> None:
        self._num_dropped_bytes += num_bytes
        if self._num_dropped_bytes > most_bytes:
            self.abort()


def _send_unframed(cycle: RequestResponseCycle) -> None:
    """Sends an answer without chunks: it ends where the connection does."""
    send = cycle.send
    cycle.chunked_encoding = False

    async def unframed(message: Any) -> None:
        # uvicorn counts what is left of the length that the answer's head names.
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = unframed  # type: ignore[method-assign] # uvicorn takes no class of a cycle


def _refusal(error: Invalid) -> bytes:
    """The answer to what never became a request, in OpenAI's form as any other."""
    body = msgspec.json.encode(body_of(error))
    lines = (
        *(f"{name}: {value}" for name, value in advice(error).items()),
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        f"x-request-id: {new_id()}",
    )
    status_line = STATUS_LINE[status_of(error)]
    return status_line + "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + body
