"""ZeroMQ as the product uses it, in virtual time: sockets, watches, pollers, wakeups. Knows no
message's content.

A connection delivers in order or breaks; what was queued when it broke is lost in silence. Faults
may also lose, repeat or replay single messages, which ZeroMQ does around a reconnection.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import zmq

from services.stage.hop.frame import decode
from shardline.base.errors import LinkLost
from tests.simulation.loom import Loom, Process, Task, current, now_s, park

Parts = list[bytes]

MAX_LATENCY_S = 0.004


class Source:
    """What a poller can wait for."""

    def __init__(self) -> None:
        self.waiters: list[Task] = []

    @property
    def is_readable(self) -> bool:
        """Something waits."""
        raise NotImplementedError

    def notify(self) -> None:
        """Wakes pollers."""
        waiters = self.waiters
        self.waiters = []
        for task in waiters:
            task.wake()


class Poller:
    """`zmq.Poller`."""

    def __init__(self) -> None:
        self._sources: list[Source] = []

    def register(self, source: Source, _flags: int) -> None:
        """Waits for this one too."""
        self._sources.append(source)

    def poll(self, timeout_ms: float) -> list[tuple[Source, int]]:
        """What is readable; waits if nothing is."""
        ready = self._ready()
        if ready or timeout_ms <= 0:
            return ready
        task = current()
        until_s = now_s() + timeout_ms / 1000
        while not ready and now_s() < until_s:
            for source in self._sources:
                source.waiters.append(task)
            park(until_s)
            for source in self._sources:
                if task in source.waiters:
                    source.waiters.remove(task)
            ready = self._ready()
        return ready

    def _ready(self) -> list[tuple[Source, int]]:
        return [(source, zmq.POLLIN) for source in self._sources if source.is_readable]


class Wakeup(Source):
    """`services.stage.hop.wakeup.Wakeup`."""

    def __init__(self) -> None:
        super().__init__()
        self._is_set = False

    @property
    def fd(self) -> Wakeup:
        """What pollers take."""
        return self

    @property
    def is_readable(self) -> bool:
        """Woken, not cleared."""
        return self._is_set

    def wake(self) -> None:
        """Wakes whoever polls."""
        self._is_set = True
        self.notify()

    def clear(self) -> bool:
        """True when woken since the last call."""
        was_set = self._is_set
        self._is_set = False
        return was_set

    def close(self) -> None:
        """Nothing to free."""


@dataclass(eq=False, slots=True)
class Connection:
    """Two sockets, in order, both ways. `last_s` keeps the order: nothing overtakes."""

    caller: Socket
    listener: Socket
    number: int
    is_open: bool = True
    last_s: dict[int, float] = field(default_factory=dict)

    def other(self, socket: Socket) -> Socket:
        """The far end."""
        return self.listener if socket is self.caller else self.caller

    def send(self, sender: Socket, parts: Parts) -> None:
        """Arrives later, if the connection lives until then."""
        receiver = self.other(sender)
        network = sender.network
        for copy in network.meddle(sender, parts):
            at_s = max(network.loom.now_s + network.latency_s(), self.last_s.get(id(receiver), 0.0))
            self.last_s[id(receiver)] = at_s
            network.loom.at(at_s, partial(self._arrive, receiver, copy))

    def _arrive(self, receiver: Socket, parts: Parts) -> None:
        if self.is_open and not receiver.closed:
            receiver.take(self, parts)

    def cut(self) -> None:
        """Both ends learn of it soon; what was on its way is lost."""
        if not self.is_open:
            return
        self.is_open = False
        for socket in (self.caller, self.listener):
            socket.network.loom.after(socket.network.latency_s(), socket.hang_up)


class Socket(Source):
    """PUSH, PULL, DEALER or ROUTER, as far as the product uses them."""

    def __init__(self, network: Network, process: Process, kind: int) -> None:
        super().__init__()
        self.network = network
        self.process = process
        self.type = kind
        self.closed = False
        self.connections: dict[bytes, Connection] = {}
        self.watch: Watch | None = None
        self._inbox: deque[Parts] = deque()
        self._rest: Parts = []
        self._drafts: Parts = []

    @property
    def is_readable(self) -> bool:
        """A message waits."""
        return bool(self._inbox)

    def take(self, connection: Connection, parts: Parts) -> None:
        """A message arrives."""
        identity = [connection.number.to_bytes(4, "big")] if self.type == zmq.ROUTER else []
        self._inbox.append([*identity, *parts])
        self.notify()

    def hang_up(self) -> None:
        """A connection broke."""
        if self.watch is not None:
            self.watch.notify()
        self.notify()

    def poll(self, _timeout_ms: int, _flags: int) -> bool:
        """Whether it takes a message."""
        return any(connection.is_open for connection in self.connections.values())

    def send(self, part: bytes, flags: int = 0, **_copy: bool) -> None:
        """A part; the last one sends them all."""
        self._drafts.append(bytes(part))
        if not flags & zmq.SNDMORE:
            parts = self._drafts
            self._drafts = []
            (connection,) = self.connections.values()
            if not connection.is_open:
                raise zmq.Again
            connection.send(self, parts)

    def send_multipart(self, parts: Sequence[bytes], _flags: int = 0) -> None:
        """ROUTER: to the peer that the first part names."""
        connection = self.connections.get(parts[0])
        if connection is None or not connection.is_open:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        connection.send(self, [bytes(part) for part in parts[1:]])

    def recv(self, _flags: int = 0, *, copy: bool = True) -> Any:
        """The next part."""
        if not self._rest:
            if not self._inbox:
                raise zmq.Again
            self._rest = self._inbox.popleft()
        part = self._rest.pop(0)
        return part if copy else zmq.Frame(part)

    def recv_multipart(self, flags: int = 0) -> Parts:
        """A whole message."""
        parts = [self.recv(flags)]
        while self._rest:
            parts.append(self.recv(flags))
        return parts

    def getsockopt(self, _option: int) -> bool:
        """RCVMORE."""
        return bool(self._rest)

    def close(self) -> None:
        """Frees the address and breaks the connections; what a DEALER said last still leaves."""
        self.closed = True
        self.network.listeners = {
            address: socket
            for address, socket in self.network.listeners.items()
            if socket is not self
        }
        linger_s = 2 * MAX_LATENCY_S if self.type == zmq.DEALER and self.process.is_alive else 0.0
        for connection in self.connections.values():
            self.network.loom.after(linger_s, connection.cut)


class Watch(Source):
    """`services.stage.hop.sockets.Watch`."""

    def __init__(self, socket: Socket) -> None:
        super().__init__()
        self._socket = socket
        socket.watch = self

    @property
    def events(self) -> Watch:
        """What pollers take."""
        return self

    @property
    def is_readable(self) -> bool:
        """The peer is gone."""
        return self.lost() is not None

    def lost(self) -> str | None:
        """Why the peer is gone."""
        connections = self._socket.connections.values()
        return (
            "the connection was closed"
            if connections and not any(one.is_open for one in connections)
            else None
        )

    def close(self) -> None:
        """Before the socket."""


@dataclass(eq=False, slots=True)
class Network:
    """All addresses and connections. `loss` is how often a frame is lost, repeated or replayed
    while faults strike."""

    loom: Loom
    loss: float = 0.0
    listeners: dict[str, Socket] = field(default_factory=dict)
    connections: list[Connection] = field(default_factory=list)
    num_lost: int = 0
    num_repeated: int = 0
    num_replayed: int = 0
    sent: dict[tuple[str, int, int], Parts] = field(default_factory=dict)
    """The first frame of each sender, kind and step: of its first epoch."""
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def latency_s(self) -> float:
        """Of one message."""
        return self.loom.rng.uniform(0.0002, MAX_LATENCY_S)

    def meddle(self, sender: Socket, parts: Parts) -> list[Parts]:
        """What arrives of a frame: mostly that frame."""
        if sender.type != zmq.PUSH or self.loss == 0.0:
            return [parts]
        if self.loom.rng.random() > self.loss:
            self._remember(sender, parts)
            return [parts]
        kind = self.loom.rng.randrange(3)
        if kind == 0:
            self.num_lost += 1
            return []
        if kind == 1:
            self.num_repeated += 1
            return [parts, parts]
        older = self._older(sender, parts)
        self.num_replayed += older is not None
        return [parts] if older is None else [older, parts]

    def _remember(self, sender: Socket, parts: Parts) -> None:
        frame = decode(parts)
        self.sent.setdefault((sender.process.name, frame.kind, frame.step), parts)

    def _older(self, sender: Socket, parts: Parts) -> Parts | None:
        """What the same process sent as this step in an earlier epoch."""
        frame = decode(parts)
        older = self.sent.get((sender.process.name, frame.kind, frame.step))
        return older if older is not None and decode(older).epoch < frame.epoch else None


class Sockets:
    """The `SocketFactory` of one process."""

    def __init__(self, network: Network, process: Process, *, dead_s: float) -> None:
        self._network = network
        self._process = process
        self._dead_s = dead_s
        self._open: list[Socket] = []
        process.on_death.append(self._hang_up)
        process.on_pause.append(self._fall_silent)

    def bind(
        self,
        kind: int,
        options: Mapping[int, int],  # noqa: ARG002 (SocketFactory's)
    ) -> tuple[Any, str]:
        """A bound socket and its address."""
        socket = self._make(kind)
        address = f"tcp://{self._process.name}:{next(self._network.numbers)}"
        self._network.listeners[address] = socket
        return socket, address

    def connect(
        self,
        kind: int,
        address: str,
        options: Mapping[int, int],  # noqa: ARG002 (SocketFactory's)
        timeout_s: float,
    ) -> tuple[Any, Any]:
        """A connected socket. A peer that is paused answers no handshake."""
        until_s = now_s() + timeout_s
        park(now_s() + self._network.latency_s())
        listener = self._network.listeners.get(address)
        while (
            listener is not None
            and not listener.closed
            and listener.process.is_paused
            and now_s() < until_s
        ):
            park(min(until_s, now_s() + 0.1))
        if listener is None or listener.closed or listener.process.is_paused:
            raise LinkLost(f"no link to {address}")
        socket = self._make(kind)
        connection = Connection(socket, listener, next(self._network.numbers))
        socket.connections[b""] = connection
        listener.connections[connection.number.to_bytes(4, "big")] = connection
        self._network.connections.append(connection)
        return socket, Watch(socket)

    def watch(self, socket: Any) -> Any:
        """Tells when its peer is gone."""
        return Watch(socket)

    def poller(self) -> Any:
        """Waits for sockets of this network."""
        return Poller()

    def wakeup(self) -> Any:
        """Something else to wait for."""
        return Wakeup()

    def _make(self, kind: int) -> Socket:
        socket = Socket(self._network, self._process, kind)
        self._open = [one for one in self._open if not one.closed]
        self._open.append(socket)
        return socket

    def _hang_up(self) -> None:
        for socket in self._open:
            socket.close()

    def _fall_silent(self) -> None:
        """ZeroMQ's heartbeats on data links: a peer that answers none is dropped."""
        self._network.loom.after(self._dead_s, self._drop_if_silent)

    def _drop_if_silent(self) -> None:
        if self._process.is_alive and self._process.is_paused:
            for socket in self._open:
                if socket.type in (zmq.PUSH, zmq.PULL):
                    for connection in socket.connections.values():
                        connection.cut()
