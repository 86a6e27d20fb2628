"""Asks other workers of a fleet: how far away one is, and for the files of a model. Knows no
plan."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import zmq

from services.stage.fleet.peer_server import (
    LIMITS,
    OK,
    PIECE_BYTES,
    WINDOW,
    Echo,
    FileSize,
    ListFiles,
    ReadFile,
)
from services.stage.hop.sockets import SocketFactory
from shardline.base.clock import monotonic_s
from shardline.base.errors import LinkLost
from shardline_costs import Link

SMALL_RUNS = 9
LARGE_RUNS = 5
MEASURE_S = 1.0
"""For one link: after that the times of the runs so far count."""
ANSWER_S = 2.0
"""To connect, and to measure."""
PIECE_S = 20.0
"""For a piece: a link of 1 MB/s needs 8 s for a window."""
LEAST_S = 1e-9


class Peer:
    """Asks one other worker."""

    def __init__(self, socket: zmq.Socket[bytes], address: str) -> None:
        self._socket = socket
        self.address = address

    def files(self, model: str) -> list[FileSize]:
        """Those of a model. Raises LinkLost if the peer refuses or does not answer."""
        self._ask(ListFiles(model=model))
        try:
            return msgspec.msgpack.decode(self._answer(ANSWER_S), type=list[FileSize])
        except msgspec.MsgspecError as error:
            raise LinkLost(f"{self.address} answers what is no list of files: {error}") from error

    def read(self, model: str, name: str, start: int, num_bytes: int) -> Iterator[bytes]:
        """Yields the bytes of a file from `start` on, WINDOW pieces ahead. Raises LinkLost."""
        offsets = iter(range(start, num_bytes, PIECE_BYTES))
        asked: deque[int] = deque()
        while True:
            while len(asked) < WINDOW and (offset := next(offsets, None)) is not None:
                asked.append(min(PIECE_BYTES, num_bytes - offset))
                self._ask(ReadFile(model=model, name=name, offset=offset, length=asked[-1]))
            if not asked:
                return
            piece = self._answer(PIECE_S)
            if len(piece) != asked.popleft():
                raise LinkLost(f"{self.address} sent a shorter {name} than announced")
            yield piece

    def round_trip_s(self, load: bytes, num_runs: int, end_s: float) -> float:
        """Returns the time of an echo: the lower quartile, after a first run that counts only if
        there is time for no other."""
        times: list[float] = []
        while len(times) <= num_runs and (not times or monotonic_s() < end_s):
            began_s = monotonic_s()
            self._ask(Echo(load))
            self._answer(ANSWER_S)
            times.append(monotonic_s() - began_s)
        return statistics.quantiles(times[1:])[0] if len(times) > 2 else times[-1]

    def _ask(self, question: Echo | ListFiles | ReadFile) -> None:
        try:
            self._socket.send(msgspec.msgpack.encode(question), zmq.NOBLOCK)
        except zmq.Again as error:
            raise LinkLost(f"{self.address} takes nothing more") from error

    def _answer(self, timeout_s: float) -> bytes:
        if not self._socket.poll(round(timeout_s * 1000)):
            raise LinkLost(f"{self.address} does not answer in {timeout_s:.0f} s")
        status, *content = self._socket.recv_multipart()
        if status != OK or len(content) != 1:
            raise LinkLost(f"{self.address} refuses: {b' '.join(content).decode(errors='replace')}")
        return content[0]


@contextmanager
def connected(sockets: SocketFactory, address: str) -> Iterator[Peer]:
    """A context with the peer at this address. Raises LinkLost if no peer answers there."""
    socket, watch = sockets.connect(zmq.DEALER, address, LIMITS, ANSWER_S)
    try:
        yield Peer(socket, address)
    finally:
        watch.close()
        socket.close()


def measure_link(sockets: SocketFactory, address: str) -> Link:
    """Returns what frames meet on the way to the peer at `address`. Raises LinkLost if it does not
    answer."""
    with connected(sockets, address) as peer:
        end_s = monotonic_s() + MEASURE_S
        small_s = peer.round_trip_s(b"", SMALL_RUNS, end_s)
        large_s = peer.round_trip_s(bytes(PIECE_BYTES), LARGE_RUNS, end_s)
    return Link(latency_s=small_s / 2, bytes_per_s=PIECE_BYTES / max(LEAST_S, large_s - small_s))
