"""The proxy does to real connections what it says: a fault that is not injected would prove
nothing."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.network.proxy import Direction, Proxy

PATIENCE_S = 60.0
QUIET_S = 0.2
"""Long enough for loopback to bring what was not held back."""
ENDLESS_BYTES = 64 << 20
"""More than all buffers on the way."""


class Pair:
    """A caller and a server, connected through a proxy."""

    def __init__(self, proxy: Proxy, listener: socket.socket) -> None:
        self.proxy = proxy
        self.listener = listener
        self.client, self.server = self.connect()

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """One more connection."""
        client = self.call()
        server, _ = self.listener.accept()
        server.settimeout(PATIENCE_S)
        return client, server

    def call(self) -> socket.socket:
        """The caller's end alone."""
        return socket.create_connection((self.proxy.host, self.proxy.port), PATIENCE_S)


def serve(proxy: Proxy, listener: socket.socket) -> Iterator[Pair]:
    listener.settimeout(PATIENCE_S)
    proxy.start()
    pair = Pair(proxy, listener)
    yield pair
    proxy.stop()
    for end in (pair.client, pair.server, listener):
        end.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    listener = socket.create_server(("127.0.0.1", 0))
    yield from serve(Proxy(listener.getsockname()), listener)


@pytest.fixture
def unix_pair(tmp_path: Path) -> Iterator[Pair]:
    path = str(tmp_path / "server")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    yield from serve(Proxy(path), listener)


def receive(end: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes and (piece := end.recv(num_bytes - len(data))):
        data += piece
    return data


def is_quiet(end: socket.socket) -> bool:
    return not select.select([end], [], [], QUIET_S)[0]


def exchange(client: socket.socket, server: socket.socket) -> None:
    """Both ways, a megabyte: more than any one buffer."""
    question = bytes(range(256)) * 4096
    client.sendall(question)
    assert receive(server, len(question)) == question
    server.sendall(question[::-1])
    assert receive(client, len(question)) == question[::-1]


def test_a_clear_proxy_delivers_every_byte_and_the_end(pair: Pair) -> None:
    exchange(pair.client, pair.server)

    pair.client.shutdown(socket.SHUT_WR)
    assert pair.server.recv(1) == b""
    pair.server.sendall(b"after the caller's end")
    assert receive(pair.client, 22) == b"after the caller's end"
    pair.server.close()
    assert pair.client.recv(1) == b""


def test_a_proxy_to_a_unix_socket_delivers_every_byte(unix_pair: Pair) -> None:
    exchange(unix_pair.client, unix_pair.server)


def test_a_proxy_with_nobody_behind_it_resets_its_caller() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    proxy = Proxy(address)
    proxy.start()

    # The reset may come before the caller has finished connecting.
    with (
        pytest.raises(ConnectionResetError),
        socket.create_connection((proxy.host, proxy.port), PATIENCE_S) as client,
    ):
        client.recv(1)
    proxy.stop()


def test_a_half_open_proxy_delivers_nothing_until_it_is_cleared(pair: Pair) -> None:
    pair.proxy.half_open()
    caller = pair.call()
    for end in (pair.client, pair.server, caller):
        end.sendall(b"is anybody there")

    assert is_quiet(pair.client)
    assert is_quiet(pair.server)
    assert is_quiet(caller)
    assert is_quiet(pair.listener)

    pair.proxy.clear()
    for end in (pair.client, pair.server, caller):
        with pytest.raises(ConnectionResetError):
            end.recv(1)
    exchange(*pair.connect())


def test_a_delay_counts_both_ways_of_a_round_trip(pair: Pair) -> None:
    pair.proxy.delay(0.1, 0.05)
    started_s = time.monotonic()

    exchange(pair.client, pair.server)

    assert time.monotonic() - started_s >= 2 * 0.05


@pytest.mark.parametrize("direction", Direction)
def test_a_one_way_partition_delivers_one_direction_until_it_is_cleared(
    pair: Pair, direction: Direction
) -> None:
    cut_off, heard = (
        (pair.client, pair.server)
        if direction is Direction.TO_SERVER
        else (pair.server, pair.client)
    )
    pair.proxy.drop(direction)
    cut_off.sendall(b"one")
    cut_off.sendall(b"two")
    heard.sendall(b"still here")

    assert receive(cut_off, 10) == b"still here"
    assert is_quiet(heard)

    pair.proxy.clear()
    assert receive(heard, 6) == b"onetwo"


def test_a_partition_hides_the_end_of_the_side_cut_off(pair: Pair) -> None:
    pair.proxy.drop(Direction.TO_SERVER)
    pair.client.close()

    assert is_quiet(pair.server)

    pair.proxy.clear()
    assert pair.server.recv(1) == b""


def test_a_cut_resets_both_ends_and_new_connections_are_served(pair: Pair) -> None:
    pair.proxy.drop(Direction.TO_SERVER)
    pair.client.sendall(b"never arrives")
    assert is_quiet(pair.server)

    pair.proxy.cut()

    for end in (pair.client, pair.server):
        with pytest.raises(ConnectionResetError):
            end.recv(1)
    pair.proxy.clear()
    exchange(*pair.connect())


def test_a_slow_link_holds_a_flood_back_until_it_is_cleared(pair: Pair) -> None:
    pair.proxy.slow(10_000)
    pair.client.setblocking(False)
    num_sent = 0
    while select.select([], [pair.client], [], QUIET_S)[1]:
        num_sent += pair.client.send(bytes(1 << 16))
        assert num_sent < ENDLESS_BYTES, "nothing holds the sender back"
    assert len(receive(pair.server, 2_000)) == 2_000

    pair.proxy.clear()

    assert len(receive(pair.server, num_sent - 2_000)) == num_sent - 2_000


def test_a_stopped_proxy_ends_its_links_and_does_not_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = Proxy(listener.getsockname())
        proxy.start()
        client = socket.create_connection((proxy.host, proxy.port), PATIENCE_S)
        listener.accept()[0].close()

        proxy.stop()

        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((proxy.host, proxy.port), PATIENCE_S)
        client.close()


def test_a_proxy_that_leads_elsewhere_leaves_open_connections_where_they_are(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(PATIENCE_S)
        pair.proxy.lead_to(other.getsockname())
        with pair.call() as client:
            server, _ = other.accept()
            with server:
                client.sendall(b"new")
                assert server.recv(3) == b"new"
        pair.client.sendall(b"old")
        assert pair.server.recv(3) == b"old"
