"""Measures links between machines: each worker of a fleet answers what others send, and they take the time.

Not the links of a pipeline: nothing runs yet when layers are given out. Knows no plan.
"""

from __future__ import annotations

import statistics
import threading

import zmq

from services.stage.hop.sockets import SocketFactory
from shardline.clock import monotonic_s
from shardline.errors import LinkLost
from shardline.planner import Link

LOAD_BYTES = 1 << 20
"""About what a step of 256 rows sends."""
MAX_QUEUED = 16
SMALL_RUNS, LARGE_RUNS = 9, 5
MEASURE_S = 1.0
"""For one link: after that the times of the runs so far count."""
ANSWER_S = 2.0
LEAST_S = 1e-9


class Echo(threading.Thread):
    """Answers each message with an empty one."""

    def __init__(self, sockets: SocketFactory) -> None:
        """Raises Unavailable if no address is free."""
        super().__init__(name="echo", daemon=True)
        limits: dict[int, int] = {zmq.RCVHWM: MAX_QUEUED, zmq.SNDHWM: MAX_QUEUED, zmq.MAXMSGSIZE: 2 * LOAD_BYTES}
        self._socket, self.address = sockets.bind(zmq.ROUTER, limits)
        self._wakeup, self._poller = sockets.wakeup(), sockets.poller()
        for source in (self._socket, self._wakeup.fd):
            self._poller.register(source, zmq.POLLIN)

    def run(self) -> None:
        """The peer's name comes before its message; an answer to one that is gone is dropped."""
        while not self._wakeup.clear():
            if self._socket in dict(self._poller.poll()):
                peer, *_ = self._socket.recv_multipart(copy=False)
                self._socket.send_multipart([peer.bytes, b""])
        self._socket.close()
        self._wakeup.close()

    def stop(self) -> None:
        """Ends the thread and closes its socket."""
        self._wakeup.wake()
        self.join()


def measure_link(sockets: SocketFactory, address: str) -> Link:
    """Returns what frames meet on the way to the echo at `address`. Raises LinkLost if it does not answer."""
    socket, watch = sockets.connect(zmq.DEALER, address, {zmq.RCVHWM: MAX_QUEUED}, ANSWER_S)
    try:
        end_s = monotonic_s() + MEASURE_S
        small_s = _round_trip_s(socket, address, b"", SMALL_RUNS, end_s)
        large_s = _round_trip_s(socket, address, bytes(LOAD_BYTES), LARGE_RUNS, end_s)
    finally:
        watch.close()
        socket.close()
    return Link(latency_s=small_s / 2, bytes_per_s=LOAD_BYTES / max(LEAST_S, large_s - small_s))


def _round_trip_s(socket: zmq.Socket[bytes], address: str, message: bytes, num_runs: int, end_s: float) -> float:
    """The lower quartile, after a first run that counts only if there is time for no other."""
    times: list[float] = []
    while len(times) <= num_runs and (not times or monotonic_s() < end_s):
        began_s = monotonic_s()
        socket.send(message, zmq.NOBLOCK)
        if not socket.poll(round(ANSWER_S * 1000)):
            raise LinkLost(f"{address} does not answer in {ANSWER_S:.0f} s")
        socket.recv()
        times.append(monotonic_s() - began_s)
    return statistics.quantiles(times[1:])[0] if len(times) > 2 else times[-1]
