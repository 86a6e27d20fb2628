"""TLS before a server that has none, with a certificate of tests/tls: hears all that is sent. Knows
no protocol."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TLS = Path(__file__).parent / "tls"
AUTHORITY = TLS / "authority.pem"
"""Signed `server`, `elsewhere` (of another name) and `caller`; `impostor` signed itself, under the
server's name."""

CHUNK_BYTES = 64 << 10
ANSWER_S = 10.0


class TlsFront:
    """One thread and one event loop; each connection is passed on to `target` as it is."""

    def __init__(
        self, target: tuple[str, int], certificate: str, *, asks_callers: bool = False
    ) -> None:
        self.heard = bytearray()
        self.port = 0
        self._target = target
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(TLS / f"{certificate}.pem")
        if asks_callers:
            self._context.verify_mode = ssl.CERT_REQUIRED
            self._context.load_verify_locations(AUTHORITY)

    async def serve(self, started: threading.Event) -> None:
        """Until `stop`."""
        server = await asyncio.start_server(self._join, "127.0.0.1", 0, ssl=self._context)
        self.port = server.sockets[0].getsockname()[1]
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        started.set()
        await self._stopped.wait()
        server.close()

    def stop(self) -> None:
        """End all connections; callable from any thread."""
        self._loop.call_soon_threadsafe(self._stopped.set)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Python 3.11's streams report a cancelled connection as an error.
        with suppress(OSError, asyncio.CancelledError):
            there, away = await asyncio.open_connection(*self._target)
            ways = [self._pump(reader, away, self.heard), self._pump(there, writer, bytearray())]
            await asyncio.gather(*ways)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, heard: bytearray
    ) -> None:
        with suppress(OSError):
            while chunk := await source.read(CHUNK_BYTES):
                heard += chunk
                sink.write(chunk)
                await sink.drain()
        sink.close()


@contextmanager
def tls_front(
    target: tuple[str, int], certificate: str, *, asks_callers: bool = False
) -> Iterator[TlsFront]:
    """Serves while inside, on a port of 127.0.0.1."""
    front = TlsFront(target, certificate, asks_callers=asks_callers)
    started = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(front.serve(started)), name="tls-front")
    thread.start()
    assert started.wait(ANSWER_S)
    try:
        yield front
    finally:
        front.stop()
        thread.join()
