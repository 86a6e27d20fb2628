"""Makes ZeroMQ sockets and what waits for them: where they bind, what they advertise, CURVE, and
when a peer is gone. Knows no message.

A socket is used by one thread at a time; handing it to another through a queue or a thread's start
is allowed.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import Protocol
from uuid import uuid4

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from services.stage.hop.wakeup import Wakeup
from shardline.base.clock import monotonic_s
from shardline.base.errors import Invalid, LinkLost, Unavailable
from shardline_server.host.private import private_folder

ZAP_DOMAIN = "shardline"
FOLDER_FIELD = "SHARDLINE_RUN_DIR"
HOST_FIELD = "SHARDLINE_HOP_BIND"
PORTS_FIELD = "SHARDLINE_HOP_PORTS"
SECRET_BYTES = 32
MAX_IPC_PATH_BYTES = 107
"""The longest path of a unix socket on Linux."""
MAX_PORT = 65_535

_MET = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_CALLERS = (zmq.PUSH, zmq.DEALER)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """One key pair (Z85) that all stages of an installation share: peers without it are refused."""

    public: bytes
    secret: bytes
    server: bytes
    """The public key that the called peer must have: the same one."""

    @classmethod
    def of(cls, secret: str) -> CurveKeys:
        """Derives the pair from the secret key. Raises Invalid, without repeating the key, if it is
        not valid."""
        text = secret.strip()
        if re.fullmatch(rf"[0-9A-Fa-f]{{{2 * SECRET_BYTES}}}", text) is None:
            problem = f"it has not {2 * SECRET_BYTES} hexadecimal digits"
            raise Invalid("SHARDLINE_HOP_SECRET_KEY", problem, "Make one: openssl rand -hex 32")
        encoded = z85.encode(bytes.fromhex(text))
        public = zmq.curve_public(encoded)
        return cls(public=public, secret=encoded, server=public)

    def __repr__(self) -> str:
        return "CurveKeys(…)"

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002 (pyzmq's provider)
        """Returns whether a client that has proved to hold `key` may connect."""
        return key == self.public


class SocketFactory(Protocol):
    """Makes what hops and control links of one process are made of: sockets, and what waits for
    them."""

    def bind(self, kind: int, options: Mapping[int, int]) -> tuple[zmq.Socket[bytes], str]:
        """Returns a bound socket and the address that peers use. Raises Unavailable."""

    def connect(
        self, kind: int, address: str, options: Mapping[int, int], timeout_s: float
    ) -> tuple[zmq.Socket[bytes], Watch]:
        """Returns a connected socket with its watch. Raises LinkLost if the peer does not answer in
        `timeout_s`."""

    def watch(self, socket: zmq.Socket[bytes]) -> Watch:
        """Watches the only peer of a bound socket."""

    def poller(self) -> zmq.Poller:
        """Waits for any of several sockets."""

    def wakeup(self) -> Wakeup:
        """Interrupts a thread that waits in a poller."""


class Sockets:
    """Makes the sockets of one process: the SocketFactory of ZeroMQ.

    `bind` is `tcp://HOST` (0.0.0.0 for all) or `ipc:///FOLDER`; `advertise` is the host that peers
    connect to. Without it that is the bound host, or this machine's own name if all are bound.
    `ports` are those that a firewall lets through; without them any free port is used. Raises
    Invalid for a `bind` of another form.
    """

    def __init__(
        self,
        *,
        bind: str,
        advertise: str | None = None,
        ports: range | None = None,
        curve: CurveKeys | None = None,
    ) -> None:
        self._scheme, self._host = _parse_bind(bind)
        is_any_host = self._host in ("0.0.0.0", "*")  # noqa: S104 (compared)
        self._advertise = advertise or (gethostname() if is_any_host else self._host)
        self._ports = ports
        # Each socket takes the port after the one before: a late peer of a closed socket does not
        # reach another one.
        first = random.randrange(len(ports)) if ports else 0  # noqa: S311 (no secret)
        self._next_port = itertools.count(first)
        self._curve = curve
        self._context = zmq.Context()
        self._authenticator = self._authenticate(curve) if curve else None

    def bind(self, kind: int, options: Mapping[int, int]) -> tuple[zmq.Socket[bytes], str]:
        """Returns a socket bound to a free port or path, and the address that peers use. Raises
        Unavailable."""
        socket = self._open(kind, options)
        if self._curve:
            socket.curve_server = True
            socket.zap_domain = ZAP_DOMAIN.encode()
        try:
            self._bind(socket)
        except Unavailable:
            socket.close()
            raise
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        return (
            socket,
            bound
            if self._scheme == "ipc"
            else f"tcp://{self._advertise}:{bound.rpartition(':')[2]}",
        )

    def _bind(self, socket: zmq.Socket[bytes]) -> None:
        for endpoint in self._endpoints():
            try:
                socket.bind(endpoint)
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or self._ports is None:
                    raise Unavailable(f"cannot bind {endpoint}: {error}") from error
            else:
                return
        raise Unavailable(
            f"no port is free on {self._host}: widen {PORTS_FIELD}, or stop what else listens there"
        )

    def _endpoints(self) -> Iterator[str]:
        """Yields the endpoints to try, in order."""
        if self._scheme == "ipc":
            yield f"ipc://{self._host}/{uuid4().hex[:12]}"
        elif self._ports is None:
            yield f"tcp://{self._host}:*"
        else:
            for number in itertools.islice(self._next_port, len(self._ports)):
                yield f"tcp://{self._host}:{self._ports[number % len(self._ports)]}"

    def connect(
        self, kind: int, address: str, options: Mapping[int, int], timeout_s: float
    ) -> tuple[zmq.Socket[bytes], Watch]:
        """Returns a connected socket with its watch. Raises LinkLost if the peer does not answer in
        `timeout_s`.

        The socket never reconnects: frames queued in a broken connection are lost.
        """
        socket = self._open(kind, {zmq.RECONNECT_IVL: -1, zmq.IMMEDIATE: 1, **options})
        if self._curve:
            socket.curve_serverkey = self._curve.server
        watch = Watch(socket)  # Before connecting: over ipc a refusal comes at once.
        try:
            socket.connect(address)
            problem = watch.refusal(timeout_s)
            if problem is None:
                return socket, watch
        except zmq.ZMQError as error:
            problem = str(error)
        watch.close()
        socket.close()
        raise LinkLost(f"no link to {address}: {problem}")

    def watch(self, socket: zmq.Socket[bytes]) -> Watch:
        """Watches the only peer of a bound socket."""
        return Watch(socket)

    def poller(self) -> zmq.Poller:
        """Waits for any of several sockets."""
        return zmq.Poller()

    def wakeup(self) -> Wakeup:
        """Interrupts a thread that waits in a poller."""
        return Wakeup()

    def close(self) -> None:
        """Closes all sockets. Call it when no thread uses one any more."""
        if self._authenticator:
            self._authenticator.stop()
        self._context.destroy(linger=0)

    def _open(self, kind: int, options: Mapping[int, int]) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        if self._curve:
            socket.curve_publickey = self._curve.public
            socket.curve_secretkey = self._curve.secret
        for option, value in options.items():
            socket.setsockopt(option, value)
        return socket

    def _authenticate(self, curve: CurveKeys) -> ThreadAuthenticator:
        authenticator = ThreadAuthenticator(self._context)
        authenticator.start()
        authenticator.configure_curve_callback(domain=ZAP_DOMAIN, credentials_provider=curve)
        return authenticator


class Watch:
    """Watches a socket's only peer: tells when the connection broke, was refused, or was never
    made."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._candidates: set[int] = set()
        self._is_met = False
        address = f"inproc://watch-{uuid4().hex}"
        socket.monitor(address, _MET | _GONE)
        self.events = socket.context.socket(zmq.PAIR)
        """A socket that is readable when there are events; poll it."""
        self.events.setsockopt(zmq.LINGER, 0)
        self.events.connect(address)

    def lost(self) -> str | None:
        """Returns why the peer is gone, or None. Strangers that failed the handshake, or came
        later, do not count."""
        while self.events.poll(0):
            event, connection = struct.unpack_from("=Hi", self.events.recv_multipart()[0])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_met = True
            elif event == zmq.EVENT_ACCEPTED and not self._is_met:
                self._candidates.add(connection)
            elif event == zmq.EVENT_CLOSED:
                return "the connection was refused"
            elif event == zmq.EVENT_DISCONNECTED:
                was_candidate = connection in self._candidates
                self._candidates.discard(connection)
                if self._socket.type in _CALLERS or (self._is_met and was_candidate):
                    return "the connection was closed"
        return None

    def refusal(self, timeout_s: float) -> str | None:
        """Waits until the socket accepts a message; returns None then, or why it does not within
        `timeout_s`."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLOUT)
        poller.register(self.events, zmq.POLLIN)
        deadline = monotonic_s() + timeout_s
        # A poll may report the end of the handshake before the room for a message: poll again.
        while (left_s := deadline - monotonic_s()) > 0:
            if self._socket in dict(poller.poll(math.ceil(left_s * 1000))):
                return None
            problem = self.lost()
            if problem is not None:
                return problem
        return f"no answer in {timeout_s:.1f} s"

    def close(self) -> None:
        """Stops watching. Call it before the socket is closed."""
        self._socket.disable_monitor()
        self.events.close()


def parse_ports(text: str | None) -> range | None:
    """Parses a range such as `7600-7631`, both ends included; None stays None. Raises Invalid for
    any other text."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    ports = range(int(match[1]), int(match[2]) + 1) if match else range(0)
    if not ports or ports[0] < 1 or ports[-1] > MAX_PORT:
        raise Invalid(
            PORTS_FIELD,
            f"{text!r} is not a range of ports from 1 to {MAX_PORT}",
            "Use FIRST-LAST: 7600-7631",
        )
    return ports


def _parse_bind(bind: str) -> tuple[str, str]:
    match = re.fullmatch(r"(tcp)://([^:/\s]+)|(ipc)://(/\S+)", bind)
    if match is None:
        raise Invalid(
            FOLDER_FIELD if bind.startswith("ipc:") else HOST_FIELD,
            f"{bind!r} is not an address to bind",
            "Use tcp://HOST (no port) or ipc:///FOLDER (absolute, no blanks)",
        )
    if match[1]:
        return match[1], match[2]
    folder = match[4].rstrip("/")
    if len(folder.encode()) + 13 > MAX_IPC_PATH_BYTES:
        raise Invalid(
            FOLDER_FIELD,
            f"{folder!r} leaves no room for a socket's name in the {MAX_IPC_PATH_BYTES} bytes "
            "of a unix socket's path",
            "Use a shorter folder",
        )
    return match[3], str(private_folder(Path(folder), FOLDER_FIELD))
