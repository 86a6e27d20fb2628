"""What workers ask each other, on real sockets: how far away they are, and the files of a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from services.stage.fleet.frame_cost import measure_frames
from services.stage.fleet.peer import Peer, connected, measure_link
from services.stage.fleet.peer_server import PIECE_BYTES, REFUSED, WINDOW, PeerServer, ReadFile
from services.stage.hop.sockets import CurveKeys, Sockets
from services.stage.hop.zeromq import ZeroMqHop
from shardline.base.config import Times
from shardline.base.errors import LinkLost
from tests.chaos.network.proxy import Proxy

DELAY_S = 0.02
MODEL = "clerk"
NAME = "model.safetensors"
CONTENT = bytes(range(256)) * ((2 * WINDOW * PIECE_BYTES + 512) // 256)
"""More than a window, and no whole number of pieces."""


@pytest.fixture(params=["ipc", "tcp", "encrypted"])
def sockets(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sockets]:
    bind = f"ipc://{tmp_path}" if request.param == "ipc" else "tcp://127.0.0.1"
    sockets = Sockets(
        bind=bind, curve=CurveKeys.of("ab" * 32) if request.param == "encrypted" else None
    )
    yield sockets
    sockets.close()


@pytest.fixture
def server(sockets: Sockets, tmp_path: Path) -> Iterator[PeerServer]:
    (tmp_path / NAME).write_bytes(CONTENT)
    (tmp_path / "secret").write_text("nobody asked for it")
    server = PeerServer(sockets, {MODEL: [tmp_path / NAME]})
    server.start()
    yield server
    server.stop()


@pytest.fixture
def peer(sockets: Sockets, server: PeerServer) -> Iterator[Peer]:
    with connected(sockets, server.address) as peer:
        yield peer


def test_a_link_to_oneself_is_measured_as_often_as_asked(
    sockets: Sockets, server: PeerServer
) -> None:
    for link in (measure_link(sockets, server.address), measure_link(sockets, server.address)):
        assert link.latency_s > 0
        assert link.bytes_per_s > 0


@pytest.mark.parametrize("start", [0, 3, PIECE_BYTES + 1, len(CONTENT)])
def test_a_file_comes_whole_from_wherever_it_is_asked(peer: Peer, start: int) -> None:
    (file,) = peer.files(MODEL)
    assert (file.name, file.num_bytes) == (NAME, len(CONTENT))
    assert b"".join(peer.read(MODEL, NAME, start, file.num_bytes)) == CONTENT[start:]


def test_what_is_not_offered_is_refused_and_the_next_question_answered(peer: Peer) -> None:
    for model, name in ((MODEL, "secret"), (MODEL, f"../{NAME}"), ("another", NAME), (MODEL, "")):
        with pytest.raises(LinkLost, match=r"refuses: .* is not here"):
            list(peer.read(model, name, 0, 1))
    with pytest.raises(LinkLost, match="refuses: 'another' is not here"):
        peer.files("another")
    with pytest.raises(LinkLost, match="shorter"):
        list(peer.read(MODEL, NAME, len(CONTENT), len(CONTENT) + 1))
    assert peer.files(MODEL)


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [b"\xc1"],
        [b"\x80", b"\x80"],
        [
            msgspec.msgpack.encode(
                {"type": "read", "model": MODEL, "name": NAME, "offset": -1, "length": 1}
            )
        ],
        [
            msgspec.msgpack.encode(
                ReadFile(model=MODEL, name=NAME, offset=0, length=PIECE_BYTES + 1)
            )
        ],
        [msgspec.msgpack.encode({"type": "delete", "model": MODEL})],
    ],
)
def test_what_is_no_question_is_refused(
    sockets: Sockets, server: PeerServer, parts: list[bytes]
) -> None:
    socket, watch = sockets.connect(zmq.DEALER, server.address, {}, 5.0)
    socket.send_multipart(parts)
    status, problem = socket.recv_multipart()
    assert status == REFUSED
    assert problem.startswith(b"no question")
    watch.close()
    socket.close()


def test_what_is_too_long_ends_its_own_connection_only(
    sockets: Sockets, server: PeerServer, peer: Peer
) -> None:
    socket, watch = sockets.connect(zmq.DEALER, server.address, {}, 5.0)
    socket.send(bytes(4 * PIECE_BYTES))
    assert not socket.poll(100)
    assert peer.files(MODEL)
    watch.close()
    socket.close()


@pytest.mark.parametrize("sockets", ["tcp"], indirect=True)
def test_a_long_way_counts_once_in_each_direction(sockets: Sockets, server: PeerServer) -> None:
    host, port = server.address.removeprefix("tcp://").split(":")
    proxy = Proxy((host, int(port)))
    proxy.start()
    proxy.delay(DELAY_S)
    assert measure_link(sockets, f"tcp://{proxy.host}:{proxy.port}").latency_s >= DELAY_S
    proxy.stop()


@pytest.mark.parametrize("sockets", ["tcp"], indirect=True)
def test_nobody_who_answers_is_a_lost_link(sockets: Sockets) -> None:
    silent, address = sockets.bind(zmq.ROUTER, {})
    with pytest.raises(LinkLost, match="does not answer"):
        measure_link(sockets, address)
    silent.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bytes_of_a_frame_cost_something(sockets: Sockets, dtype: str) -> None:
    hop = ZeroMqHop(sockets, Times())
    _, byte_s = measure_frames(hop, dtype=dtype, small=(1, 1024), large=(4096, 1024))
    assert byte_s > 0
