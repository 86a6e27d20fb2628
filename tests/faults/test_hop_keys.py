"""Hops of a whole stack over tcp: whoever lacks the stack's key gets no handshake, at any port of
any stage."""

from __future__ import annotations

import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from services.stage.hop.sockets import CurveKeys, Sockets
from services.stage.pipeline.registry import RedisRegistry
from services.standalone.ports import LOOPBACK
from shardline.base.errors import LinkLost
from tests.stack import ForkedStack, Stack

SHAKEN_S = 60.0
REFUSED_S = 3.0
"""A stage that does not want a stranger closes the connection at once, or says nothing."""


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Two stages over tcp, as `make up` starts them: nobody has named a key."""
    folder = Path(tempfile.mkdtemp(prefix="shardline-hops-"))
    stack = ForkedStack(
        folder,
        SHARDLINE_HOP_TRANSPORT="tcp",
        SHARDLINE_HOP_BIND=LOOPBACK,
        SHARDLINE_HOP_HOST=LOOPBACK,
    )
    try:
        stack.start()
        yield stack
    finally:
        stack.end()
        shutil.rmtree(folder, ignore_errors=True)


def key_of(stack: Stack) -> CurveKeys:
    """The one that its first start has made."""
    return CurveKeys.of((stack.home.folder / "hop_secret_key").read_text())


def ports(stack: Stack) -> list[str]:
    """Every address at which a stage listens."""
    up = stack.look()
    pids = [pid for name, pid in up["processes"].items() if name.startswith("stage-")]
    sockets = [each for pid in pids for each in psutil.Process(pid).net_connections("tcp4")]
    return [
        f"tcp://{each.laddr.ip}:{each.laddr.port}"
        for each in sockets
        if each.status == psutil.CONN_LISTEN
    ]


def is_let_in(address: str, curve: CurveKeys | None, timeout_s: float) -> bool:
    """Whether a connection comes about."""
    sockets = Sockets(bind=f"tcp://{LOOPBACK}", curve=curve)
    try:
        end, watch = sockets.connect(zmq.DEALER, address, {}, timeout_s)
    except LinkLost:
        return False
    else:
        watch.close()
        end.close()
        return True
    finally:
        sockets.close()


def test_a_stranger_gets_no_handshake_over_tcp_and_the_stack_works_on(stack: Stack) -> None:
    own = key_of(stack)
    foreign = CurveKeys.of("ab" * 32)
    assert stat.S_IMODE((stack.home.folder / "hop_secret_key").stat().st_mode) == 0o600
    # Who knows the stack's public key and proves another one of its own.
    guest = CurveKeys(public=foreign.public, secret=foreign.secret, server=own.public)
    registry = RedisRegistry(stack.urls["redis"])
    controls = {card.control for card in registry.cards("clerk")}
    registry.close()
    found = ports(stack)
    assert controls < set(found), "control links and hops"
    for address in found:
        for curve in (None, foreign, guest):
            assert not is_let_in(address, curve, REFUSED_S), f"{address} lets {curve} in"
    assert all(is_let_in(address, own, SHAKEN_S) for address in controls)
    assert stack.complete().status_code == 200
