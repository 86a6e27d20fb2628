"""A TCP proxy that can be as bad as a network: tests put it between a service and what it calls.
Knows no protocol.

One thread and one event loop for each proxy. A condition is in force for old and new connections
when the call returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

CHUNK_BYTES = 64 << 10
MAX_CHUNKS = 64
"""On their way in one direction of one connection; then the sender feels it, as with a full socket
buffer."""
SLICE_S = 0.05
"""A slow link moves a piece this often."""
ANSWER_S = 10.0
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing sends RST and drops what is unsent."""

Chunks: TypeAlias = asyncio.Queue[tuple[float, bytes | None]]
"""When each is due, and what: b"" stands for the end, None for a reset. A partition hides those as
it hides bytes."""


class Direction(Enum):
    """Seen from the one who called."""

    TO_SERVER = "to server"
    TO_CLIENT = "to client"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """What the proxy does to bytes at present."""

    held: frozenset[Direction] = frozenset()
    swallows: bool = False
    mean_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float | None = None


FAIR = Weather()


class Proxy:
    """Between callers of `host:port` and `target`: a (host, port), or the path of a unix socket."""

    def __init__(
        self, target: tuple[str, int] | str, *, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.host = host
        self.port = port
        """0 becomes a free one at the first start, and stays."""
        self.tap: Callable[[], Callable[[bytes], bytes]] | None = None
        """For each connection that is opened from now on, what callers' bytes go through."""
        self._target = target
        self._weather = FAIR
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._links: set[_Link] = set()
        self._handlers: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def start(self) -> None:
        """Listens from now on."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(ANSWER_S)

    def lead_to(self, target: tuple[str, int] | str) -> None:
        """New connections go there; open ones stay where they are."""

        def lead() -> None:
            self._target = target

        self._call(lead)

    def stop(self) -> None:
        """Ends every connection. A proxy is started once."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(ANSWER_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ANSWER_S)
        self._loop.close()

    @property
    def num_links(self) -> int:
        """Connections that are open now."""
        return len(self._links)

    def half_open(self) -> None:
        """The peer's machine is gone without a word: connections stay, new ones are taken, nothing
        comes or arrives."""
        self._call(lambda: self._change(replace(self._weather, swallows=True)))

    def delay(self, mean_s: float, jitter_s: float = 0.0) -> None:
        """Each way takes `mean_s` ± `jitter_s`; bytes stay in order."""
        self._call(lambda: self._change(replace(self._weather, mean_s=mean_s, jitter_s=jitter_s)))

    def drop(self, direction: Direction) -> None:
        """A one-way partition. As TCP does, what was sent meanwhile arrives when it is over."""
        self._call(
            lambda: self._change(replace(self._weather, held=self._weather.held | {direction}))
        )

    def slow(self, bytes_per_s: float) -> None:
        """Each connection moves this much in each direction: to the sender, a slow reader."""
        self._call(lambda: self._change(replace(self._weather, bytes_per_s=bytes_per_s)))

    def cut(self) -> None:
        """Resets every connection; what was on its way is lost. New ones are served."""
        self._call(self._cut)

    def clear(self) -> None:
        """Fair again. Connections that lost bytes in `half_open` are reset, as by a machine that
        came back."""

        def fair() -> None:
            self._change(FAIR)
            for link in [link for link in self._links if link.has_lost_bytes]:
                link.reset()

        self._call(fair)

    async def passage(self, direction: Direction) -> Weather:
        """The weather, as soon as it lets bytes of this direction pass. In the proxy's thread
        only."""
        while direction in self._weather.held:
            await self._changed.wait()
        return self._weather

    async def pause(self, pause_s: float) -> None:
        """For so long, or until the weather changes. In the proxy's thread only."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), pause_s)

    def due_s(self) -> float:
        """How long a chunk that came now is on its way."""
        weather = self._weather
        return max(
            0.0,
            random.uniform(weather.mean_s - weather.jitter_s, weather.mean_s + weather.jitter_s),
        )

    def _call(self, change: Callable[[], None]) -> None:
        async def run() -> None:
            change()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(ANSWER_S)

    def _change(self, weather: Weather) -> None:
        self._weather = weather
        self._changed.set()
        self._changed = asyncio.Event()

    def _cut(self) -> None:
        for link in list(self._links):
            link.reset()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(
            self._accept, self.host, self.port, limit=CHUNK_BYTES
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._cut()
        for handler in list(self._handlers):
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handler = self._loop.create_task(self._serve(_End(reader, writer)))
        self._handlers.add(handler)
        handler.add_done_callback(self._handlers.discard)

    async def _serve(self, client: _End) -> None:
        link = _Link(self, client)
        self._links.add(link)
        try:
            server = await self._reach()
            if server is not None:
                link.server = server
            await link.run()
        except OSError:
            link.reset()  # Nobody listens there: neither do we.
        finally:
            self._links.discard(link)
            link.close()

    async def _reach(self) -> _End | None:
        """The server's end; None in half-open weather, where a caller may connect to nobody."""
        if self._weather.swallows:
            return None
        if isinstance(self._target, str):
            return _End(*await asyncio.open_unix_connection(self._target, limit=CHUNK_BYTES))
        return _End(*await asyncio.open_connection(*self._target, limit=CHUNK_BYTES))


class _End:
    """One socket of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        raw = writer.get_extra_info("socket")
        if raw.family != socket.AF_UNIX:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def reset(self) -> None:
        """RST instead of FIN."""
        if not self.writer.is_closing():
            raw = self.writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.writer.transport.abort()


class _Link:
    """One caller and, unless nobody is there, the server that it reached."""

    def __init__(self, proxy: Proxy, client: _End) -> None:
        self._proxy = proxy
        self.client = client
        self.server: _End | None = None
        self.has_lost_bytes = False

    async def run(self) -> None:
        """Until both directions have ended, or one was reset."""
        if self.server is None:
            self.has_lost_bytes = True
            while await self.client.reader.read(CHUNK_BYTES):
                pass
            return
        ways = (
            (Direction.TO_SERVER, self.client, self.server),
            (Direction.TO_CLIENT, self.server, self.client),
        )
        async with asyncio.TaskGroup() as tasks:
            for direction, source, sink in ways:
                chunks: Chunks = asyncio.Queue(MAX_CHUNKS)
                tasks.create_task(self._read(direction, source, chunks))
                tasks.create_task(self._write(direction, sink, chunks))

    def reset(self) -> None:
        """Both ends at once."""
        for end in (self.client, self.server):
            if end is not None:
                end.reset()

    def close(self) -> None:
        """Both ends in order."""
        for end in (self.client, self.server):
            if end is not None:
                end.writer.close()

    async def _read(self, direction: Direction, source: _End, chunks: Chunks) -> None:
        due_s = 0.0
        data: bytes | None = b" "
        tap = self._proxy.tap() if self._proxy.tap and direction is Direction.TO_SERVER else None
        while data:
            weather = await self._proxy.passage(direction)
            if weather.bytes_per_s is not None:
                await chunks.join()  # A slow reader's peer must feel it, not our queue.
            try:
                data = await source.reader.read(CHUNK_BYTES)
            except OSError:
                data = None
            due_s = max(due_s, asyncio.get_running_loop().time() + self._proxy.due_s())
            passed = tap(data) if data and tap else data
            if passed or not data:
                await chunks.put((due_s, passed))

    async def _write(self, direction: Direction, sink: _End, chunks: Chunks) -> None:
        data: bytes | None = b" "
        while data:
            due_s, data = await chunks.get()
            await self._proxy.pause(due_s - asyncio.get_running_loop().time())
            if data:
                await self._deliver(data, direction, sink)
            else:
                await self._end(data, direction, sink)
            chunks.task_done()

    async def _deliver(self, data: bytes, direction: Direction, sink: _End) -> None:
        while data:
            weather = await self._proxy.passage(direction)
            size = len(data)
            if weather.bytes_per_s is not None:
                size = max(1, int(weather.bytes_per_s * SLICE_S))
                await self._proxy.pause(min(size, len(data)) / weather.bytes_per_s)
            piece = data[:size]
            data = data[size:]
            if weather.swallows:
                self.has_lost_bytes = True
                continue
            sink.writer.write(piece)
            with contextlib.suppress(OSError):  # Its own reader tells the other end.
                await sink.writer.drain()

    async def _end(self, data: bytes | None, direction: Direction, sink: _End) -> None:
        weather = await self._proxy.passage(direction)
        if weather.swallows:
            self.has_lost_bytes = True
        elif data is None:
            self.reset()
        elif sink.writer.can_write_eof():
            with contextlib.suppress(OSError):
                sink.writer.write_eof()
