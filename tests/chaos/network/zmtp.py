"""One direction of a ZMTP 3 connection, cut into whole messages. Knows no frame of ours and no
socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator

GREETING_BYTES = 64
MORE = 1
LONG = 2
COMMAND = 4

PassOn = Callable[[bytes, list[bytes]], bytes]
"""(message as it came, its parts) → what goes on instead."""


class Tap:
    """Bytes in, bytes out; each whole message goes through `pass_on`, handshakes and commands do
    not."""

    def __init__(self, pass_on: PassOn) -> None:
        self._pass_on = pass_on
        self._rest = b""
        self._num_greeting = GREETING_BYTES
        self._parts: list[bytes] = []
        self._message = b""

    def __call__(self, data: bytes) -> bytes:
        """What the other end gets now; what is not whole waits."""
        self._rest += data
        return b"".join(self._units())

    def _units(self) -> Iterator[bytes]:
        if self._num_greeting:
            # Piece by piece: each end waits for the other's first bytes.
            greeting = self._cut(min(self._num_greeting, len(self._rest)))
            self._num_greeting -= len(greeting)
            yield greeting
        while not self._num_greeting and (sizes := self._frame()) is not None:
            num_header, num_body = sizes
            flags = self._rest[0]
            raw = self._cut(num_header + num_body)
            if flags & COMMAND:
                yield raw
                continue
            self._message += raw
            self._parts.append(raw[num_header:])
            if not flags & MORE:
                yield self._pass_on(self._message, self._parts)
                self._message = b""
                self._parts = []

    def _frame(self) -> tuple[int, int] | None:
        """Sizes of header and body of the next frame; None while it is not whole."""
        if not self._rest:
            return None
        num_header = 9 if self._rest[0] & LONG else 2
        if len(self._rest) < num_header:
            return None
        num_body = int.from_bytes(self._rest[1:num_header])
        return (num_header, num_body) if len(self._rest) >= num_header + num_body else None

    def _cut(self, num: int) -> bytes:
        first = self._rest[:num]
        self._rest = self._rest[num:]
        return first
