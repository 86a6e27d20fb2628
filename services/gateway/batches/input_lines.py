"""The lines of a batch's file, read a chunk at a time: one line in memory, and none that is too
long. Knows no request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

BLANK = b" \t\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLine:
    """A line that is not blank. Its number counts blank ones too, from 1."""

    number: int
    end: int
    """The first byte behind it, in the file."""
    data: bytes | None
    """None of one that is too long."""


class LineSplitter:
    """Cuts what comes into lines. `first_byte` and `first_number` are those of the next line."""

    def __init__(self, *, max_bytes: int, first_byte: int = 0, first_number: int = 1) -> None:
        self._max_bytes = max_bytes
        self._place = first_byte
        self._number = first_number
        self._rest = bytearray()
        self._is_too_long = False

    def push(self, data: bytes) -> Iterator[InputLine]:
        """Returns the lines that end in `data`."""
        start = 0
        while (found := data.find(b"\n", start)) >= 0:
            yield from self._line(data[start : found + 1])
            start = found + 1
        self._keep(data[start:])

    def end(self) -> Iterator[InputLine]:
        """Returns the last line, if no line break ends it."""
        yield from self._line(b"")

    def _keep(self, data: bytes) -> None:
        self._place += len(data)
        if self._is_too_long or len(self._rest) + len(data) > self._max_bytes:
            self._is_too_long = True
            self._rest.clear()
        else:
            self._rest += data

    def _line(self, data: bytes) -> Iterator[InputLine]:
        self._keep(data)
        line = bytes(self._rest).strip(BLANK)
        if line or self._is_too_long:
            yield InputLine(
                number=self._number,
                end=self._place,
                data=None if self._is_too_long else line,
            )
        self._number += 1
        self._rest.clear()
        self._is_too_long = False


async def input_lines(
    chunks: AsyncIterator[bytes], splitter: LineSplitter
) -> AsyncIterator[list[InputLine]]:
    """The lines of each chunk, as it is read."""
    async for chunk in chunks:
        yield list(splitter.push(chunk))
    yield list(splitter.end())
