"""Links between stages pass the proxies of their ports, and the port tells whose they are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast
from uuid import UUID

import pytest

from services.stage.hop import Channel, Frame, Kind
from services.stage.hop.sockets import Sockets, parse_ports
from services.stage.hop.zeromq import ZeroMqHop
from shardline.base.config import Times
from shardline.base.errors import LinkLost
from tests.chaos.faults.frame_faults import FAULTS
from tests.chaos.network.hop_net import HopNet
from tests.chaos.stack.local_target import LocalTarget

PATIENCE_S = 60.0
CHANNEL = Channel(pipeline=UUID(int=1), epoch=1, kind=Kind.PLAN, num_lanes=2)
FRAME = Frame(
    kind=Kind.PLAN, pipeline=CHANNEL.pipeline, epoch=CHANNEL.epoch, step=0, message=b"step"
)


@pytest.fixture
def net() -> Iterator[HopNet]:
    net = HopNet()
    net.start()
    yield net
    net.stop()


@pytest.fixture
def hop(net: HopNet) -> Iterator[ZeroMqHop]:
    """As a stage makes it of its settings."""
    sockets = Sockets(
        bind=f"tcp://{net.settings['SHARDLINE_HOP_BIND']}",
        advertise=net.settings["SHARDLINE_HOP_HOST"],
        ports=parse_ports(net.settings["SHARDLINE_HOP_PORTS"]),
    )
    yield ZeroMqHop(sockets, Times())
    sockets.close()


def test_a_cut_proxy_lets_steps_pass_until_then_and_both_ends_notice(
    net: HopNet, hop: ZeroMqHop
) -> None:
    receiver = hop.open_receiver(CHANNEL)
    sender = hop.open_sender(CHANNEL, receiver.address, PATIENCE_S)
    sender.send(FRAME)
    assert receiver.receive(PATIENCE_S) is not None

    (proxy,) = net.to(os.getpid())
    assert net.links() == [proxy]
    proxy.cut()

    with pytest.raises(LinkLost, match="the connection was closed"):
        receiver.receive(PATIENCE_S)
    receiver.close()
    sender.close()


def test_nobody_calls_a_process_that_is_gone(net: HopNet) -> None:
    assert net.to(1 << 22) == []


@pytest.mark.parametrize("is_open", [False, True])
def test_encrypted_hops_allow_no_fault_of_frames(is_open: bool) -> None:
    net = HopNet(is_open=is_open)
    target = cast(LocalTarget, SimpleNamespace(num_stages=2, hop_net=net))
    assert net.settings["SHARDLINE_HOP_INSECURE"] == str(is_open).lower()
    assert {fault.missing(target) is None for fault in FAULTS} == {is_open}
