"""Hops over ZeroMQ: PUSH to PULL, tcp or ipc. Owns the data sockets of one epoch; knows no step's
content."""

from __future__ import annotations

import math

import zmq

from services.stage.hop import Channel, Receiver, Sender
from services.stage.hop.frame import MAX_PARTS, MAX_TENSOR_BYTES, Buffer, Frame, decode, encode
from services.stage.hop.sockets import SocketFactory, Watch
from shardline.base.clock import monotonic_s
from shardline.base.config import Times
from shardline.base.errors import LinkLost, ProtocolError

LEND_FROM_BYTES = 1 << 20
"""Smaller tensors are copied on send: lending memory to ZeroMQ costs more
(docs/decisions/stages-own-tensors.md)."""

GRACE_MS = 100
"""How long a send waits for ZeroMQ's own thread to make room: by the credit there must be room."""


class ZeroMqHop:
    """Opens the ends of ZeroMQ links, new ones for every epoch."""

    def __init__(self, sockets: SocketFactory, times: Times) -> None:
        self._sockets = sockets
        self._heartbeat_ms = max(1, round(times.heartbeat_s * 1000))
        self._dead_ms = max(1, round(times.link_dead_s * 1000))

    def open_receiver(self, channel: Channel) -> Receiver:
        """Opens the receiving end: a bound PULL socket. Raises Unavailable if no address is
        free."""
        socket, address = self._sockets.bind(zmq.PULL, self._options(channel, zmq.RCVHWM))
        return ZeroMqReceiver(socket, address, channel, self._sockets)

    def open_sender(self, channel: Channel, address: str, timeout_s: float) -> Sender:
        """Opens the sending end: a PUSH socket with a peer that has answered. Raises LinkLost after
        `timeout_s`."""
        socket, watch = self._sockets.connect(
            zmq.PUSH, address, self._options(channel, zmq.SNDHWM), timeout_s
        )
        return ZeroMqSender(socket, watch, address)

    def _options(self, channel: Channel, high_water_mark: int) -> dict[int, int]:
        return {
            # The peer reports what it has taken only at every half mark, so twice the credit never
            # blocks.
            high_water_mark: 2 * (channel.num_lanes + 1),
            zmq.MAXMSGSIZE: MAX_TENSOR_BYTES,
            zmq.HEARTBEAT_IVL: self._heartbeat_ms,
            zmq.HEARTBEAT_TIMEOUT: self._dead_ms,
            zmq.HANDSHAKE_IVL: self._dead_ms,
        }


class ZeroMqSender:
    """The `Sender` of a ZeroMQ link."""

    def __init__(self, socket: zmq.Socket[bytes], watch: Watch, address: str) -> None:
        self._socket = socket
        self._watch = watch
        self._address = address

    def send(self, frame: Frame) -> None:
        """Sends a frame. Raises LinkLost if it would block: by the credit there must be room."""
        # ZeroMQ checks at most once a millisecond what its peer has taken, but always when polled.
        if not self._socket.poll(GRACE_MS, zmq.POLLOUT):
            raise self._blocked(frame)
        *first, last = encode(frame)
        try:
            for part in first:
                self._socket.send(part, zmq.NOBLOCK | zmq.SNDMORE)
            self._socket.send(last, zmq.NOBLOCK, copy=len(last) < LEND_FROM_BYTES)
        # The connection broke after the poll, and took the room with it.
        except zmq.Again as error:
            raise self._blocked(frame) from error

    def close(self) -> None:
        """Closes the socket and drops what is still queued. May be called twice."""
        if not self._socket.closed:
            self._watch.close()
            self._socket.close()

    def _blocked(self, frame: Frame) -> LinkLost:
        problem = self._watch.lost() or "the peer takes nothing more"
        return LinkLost(f"step {frame.step} could not be sent to {self._address}: {problem}")


class ZeroMqReceiver:
    """The `Receiver` of a ZeroMQ link."""

    def __init__(
        self, socket: zmq.Socket[bytes], address: str, channel: Channel, sockets: SocketFactory
    ) -> None:
        self._socket = socket
        self._address = address
        self._channel = channel
        self._next_step = 0
        self._problem: str | None = None
        self._watch = sockets.watch(socket)
        self._wakeup = sockets.wakeup()
        self._poller = sockets.poller()
        for source in (socket, self._watch.events, self._wakeup.fd):
            self._poller.register(source, zmq.POLLIN)

    @property
    def address(self) -> str:
        """The address to which a sender connects."""
        return self._address

    def receive(self, timeout_s: float) -> Frame | None:
        """Returns the next frame of this epoch; None after `timeout_s` or `wake`.

        Raises LinkLost for a step out of order or a lost peer, ProtocolError for an invalid frame.
        """
        deadline = monotonic_s() + timeout_s
        while True:
            parts = self._take()
            if parts is not None:
                frame = decode(parts)
                if self._accepts(frame):
                    return frame
                continue
            if self._problem is not None:
                raise LinkLost(
                    f"no steps after {self._next_step - 1} on {self._address}: {self._problem}"
                )
            self._problem = self._watch.lost()
            if self._problem is not None:
                continue  # What arrived before the connection broke still counts.
            left_ms = math.ceil((deadline - monotonic_s()) * 1000)
            if self._wakeup.clear() or left_ms <= 0 or not self._poller.poll(left_ms):
                return None

    def wake(self) -> None:
        """Makes `receive` return at once. May be called from any thread, also after `close`."""
        self._wakeup.wake()

    def close(self) -> None:
        """Closes the socket and drops what is still queued. May be called twice."""
        if not self._socket.closed:
            self._watch.close()
            self._socket.close()
            self._wakeup.close()

    def _take(self) -> list[Buffer] | None:
        try:
            parts: list[Buffer] = [self._socket.recv(zmq.NOBLOCK)]
        except zmq.Again:
            return None
        while self._socket.getsockopt(zmq.RCVMORE):
            if len(parts) == MAX_PARTS:
                raise ProtocolError(f"a frame has at most {MAX_PARTS} parts")
            parts.append(self._socket.recv(zmq.NOBLOCK, copy=False).buffer)
        return parts

    def _accepts(self, frame: Frame) -> bool:
        """False for a frame of an older epoch."""
        channel = self._channel
        if frame.pipeline != channel.pipeline:
            raise ProtocolError(
                f"a frame of pipeline {frame.pipeline} on a link of {channel.pipeline}"
            )
        if frame.kind != channel.kind:
            raise ProtocolError(
                f"a {frame.kind.name} frame on a link for {channel.kind.name} frames"
            )
        if frame.epoch < channel.epoch:
            return False
        if frame.epoch > channel.epoch:
            raise LinkLost(f"a frame of epoch {frame.epoch} on a link of epoch {channel.epoch}")
        if frame.step != self._next_step:
            raise LinkLost(f"step {frame.step} came where step {self._next_step} was due")
        self._next_step += 1
        return True
