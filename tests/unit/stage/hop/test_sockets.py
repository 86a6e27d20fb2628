"""Where sockets bind and what they tell others; bad settings are refused with field, limit and
remedy."""

from __future__ import annotations

import socket

import pytest
import zmq
from pydantic import SecretStr

from services.stage.hop.sockets import CurveKeys, Sockets, parse_ports
from services.stage.hop_sockets import hop_sockets
from services.stage.settings import StageSettings
from services.standalone.ports import free_port
from shardline.base.errors import Invalid, Unavailable

PATIENCE_S = 60.0
A_MOMENT_MS = 50
A_PIECE_BYTES = 1 << 20


@pytest.mark.parametrize(
    ("bind", "advertise", "host"),
    [
        ("tcp://127.0.0.1", None, "127.0.0.1"),
        ("tcp://0.0.0.0", None, socket.gethostname()),
        ("tcp://0.0.0.0", "stage-1", "stage-1"),
    ],
)
def test_peers_are_told_a_host_that_they_can_call(
    bind: str, advertise: str | None, host: str
) -> None:
    sockets = Sockets(bind=bind, advertise=advertise)

    end, address = sockets.bind(zmq.PULL, {})

    assert address.rpartition(":")[0] == f"tcp://{host}"
    assert int(address.rpartition(":")[2]) > 0
    end.close()
    sockets.close()


@pytest.mark.parametrize(
    "bind", ["tcp://127.0.0.1:5000", "inproc://x", "ipc://relative", "127.0.0.1", ""]
)
def test_a_bad_place_to_bind_is_refused(bind: str) -> None:
    with pytest.raises(
        Invalid,
        match=r"SHARDLINE_(HOP_BIND|RUN_DIR): .* is not an address to bind\. Use tcp://HOST",
    ):
        Sockets(bind=bind)


def test_a_folder_too_long_for_unix_sockets_is_refused() -> None:
    with pytest.raises(Invalid, match="no room for a socket's name in the 107 bytes"):
        Sockets(bind="ipc:///" + "x" * 100)


def test_an_address_that_is_not_ours_is_unavailable() -> None:
    sockets = Sockets(bind="tcp://192.0.2.1")

    with pytest.raises(Unavailable, match=r"cannot bind tcp://192\.0\.2\.1"):
        sockets.bind(zmq.PULL, {})
    sockets.close()


def test_ports_behind_a_firewall_are_taken_one_after_the_other_and_no_other() -> None:
    port = free_port()
    sockets = Sockets(bind="tcp://127.0.0.1", advertise="stage-1", ports=range(port, port + 1))

    end, address = sockets.bind(zmq.PULL, {})

    assert address == f"tcp://stage-1:{port}"
    with pytest.raises(
        Unavailable, match=r"no port is free on 127\.0\.0\.1: widen SHARDLINE_HOP_PORTS"
    ):
        sockets.bind(zmq.PULL, {})
    end.close()
    sockets.close()


@pytest.mark.parametrize("text", ["7600", "7600-7599", "0-10", "7600-70000", "a-b", ""])
def test_a_range_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(
        Invalid,
        match=r"SHARDLINE_HOP_PORTS: .* is not a range of ports from 1 to 65535\. Use FIRST-LAST",
    ):
        parse_ports(text)


@pytest.mark.parametrize("secret", ["hunter2", "", "ab" * 31, "ab" * 33, "xy" * 32])
def test_a_key_of_another_form_is_refused_and_never_shown(secret: str) -> None:
    with pytest.raises(
        Invalid, match="SHARDLINE_HOP_SECRET_KEY: it has not 64 hexadecimal digits"
    ) as caught:
        CurveKeys.of(secret)

    assert not secret or secret not in str(caught.value)


def test_a_key_pair_follows_from_its_secret_and_is_never_shown() -> None:
    one = CurveKeys.of("ab" * 32)
    same = CurveKeys.of("AB" * 32 + "\n")
    other = CurveKeys.of("cd" * 32)

    assert one == same
    assert one.server == one.public != other.public
    assert repr(one) == "CurveKeys(…)"


def test_hops_over_tcp_without_a_key_are_refused_unless_declared_insecure() -> None:
    tcp = StageSettings(model="m", hop_transport="tcp", hop_bind="127.0.0.1")

    with pytest.raises(
        Invalid, match=r"SHARDLINE_HOP_SECRET_KEY: hops over tcp need a key\. Make one"
    ):
        hop_sockets(tcp)
    with pytest.raises(Invalid, match="64 hexadecimal digits"):
        hop_sockets(tcp.model_copy(update={"hop_secret_key": SecretStr("short")}))
    hop_sockets(tcp.model_copy(update={"hop_secret_key": SecretStr("ab" * 32)})).close()
    hop_sockets(tcp.model_copy(update={"hop_insecure": True})).close()


def test_a_peer_that_was_met_and_has_no_room_yet_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sockets = Sockets(bind="tcp://127.0.0.1")
    peer, address = sockets.bind(zmq.PULL, {zmq.RCVHWM: 1})
    end, watch = sockets.connect(zmq.PUSH, address, {zmq.SNDHWM: 1}, PATIENCE_S)
    while end.poll(A_MOMENT_MS, zmq.POLLOUT):
        end.send(b"x" * A_PIECE_BYTES, zmq.NOBLOCK)
    lost = watch.lost

    def read_and_look() -> str | None:
        while peer.poll(A_MOMENT_MS):
            peer.recv()
        return lost()

    monkeypatch.setattr(watch, "lost", read_and_look)
    assert watch.events.poll(0), "the news of the handshake"

    assert watch.refusal(PATIENCE_S) is None
    watch.close()
    end.close()
    peer.close()
    sockets.close()
