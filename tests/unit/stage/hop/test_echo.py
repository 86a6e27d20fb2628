"""Links are measured on real sockets, and frames by what the processor does for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from services.stage.hop.echo import LOAD_BYTES, Echo, measure_link
from services.stage.hop.frame_cost import measure_frames
from services.stage.hop.sockets import CurveKeys, Sockets
from services.stage.hop.zeromq import ZeroMqHop
from shardline.config import Times
from shardline.errors import LinkLost
from tests.chaos.network.proxy import Proxy

DELAY_S = 0.02


@pytest.fixture(params=["ipc", "tcp", "encrypted"])
def sockets(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sockets]:
    bind = f"ipc://{tmp_path}" if request.param == "ipc" else "tcp://127.0.0.1"
    sockets = Sockets(bind=bind, curve=CurveKeys.of("ab" * 32) if request.param == "encrypted" else None)
    yield sockets
    sockets.close()


@pytest.fixture
def echo(sockets: Sockets) -> Iterator[Echo]:
    echo = Echo(sockets)
    echo.start()
    yield echo
    echo.stop()


def test_a_link_to_oneself_is_measured_as_often_as_asked(sockets: Sockets, echo: Echo) -> None:
    for link in (measure_link(sockets, echo.address), measure_link(sockets, echo.address)):
        assert link.latency_s > 0
        assert link.bytes_per_s > 0


def test_what_is_too_long_ends_its_own_connection_only(sockets: Sockets, echo: Echo) -> None:
    socket, watch = sockets.connect(zmq.DEALER, echo.address, {}, 5.0)
    socket.send(bytes(4 * LOAD_BYTES))
    assert not socket.poll(100)
    assert measure_link(sockets, echo.address).latency_s > 0
    watch.close()
    socket.close()


@pytest.mark.parametrize("sockets", ["tcp"], indirect=True)
def test_a_long_way_counts_once_in_each_direction(sockets: Sockets, echo: Echo) -> None:
    host, port = echo.address.removeprefix("tcp://").split(":")
    proxy = Proxy((host, int(port)))
    proxy.start()
    proxy.delay(DELAY_S)
    link = measure_link(sockets, f"tcp://{proxy.host}:{proxy.port}")
    assert link.latency_s >= DELAY_S
    proxy.stop()


@pytest.mark.parametrize("sockets", ["tcp"], indirect=True)
def test_nobody_who_answers_is_a_lost_link(sockets: Sockets) -> None:
    silent, address = sockets.bind(zmq.ROUTER, {})
    with pytest.raises(LinkLost, match="does not answer"):
        measure_link(sockets, address)
    silent.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frame_costs_something_and_its_bytes_more(sockets: Sockets, dtype: str) -> None:
    hop = ZeroMqHop(sockets, Times())
    frame_s, byte_s = measure_frames(hop, dtype=dtype, small=(1, 1024), large=(4096, 1024))
    assert frame_s >= 0
    assert byte_s > 0
