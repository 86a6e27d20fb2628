"""Heads and stages over a bad network: a link that is bad enough is lost, never silently wrong, and
forms again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from uuid import UUID

import pytest

from services.stage.hop import Channel, Frame, Kind, Sender
from services.stage.hop.sockets import Sockets, parse_ports
from services.stage.hop.wiring import Wiring
from services.stage.hop.zeromq import ZeroMqHop
from shardline.base.config import Times
from shardline.base.errors import LinkLost
from tests.chaos.network.hop_net import HopNet
from tests.chaos.network.proxy import Direction, Proxy
from tests.links import NUM_LAYERS, PATIENCE_S, Pipes, Stage, open_pipes, pass_a_step

TIMES = Times(heartbeat_s=0.1, link_dead_s=0.8, unbind_s=1.0, stall_s=60.0)
CHANNEL = Channel(pipeline=UUID(int=1), epoch=1, kind=Kind.PLAN, num_lanes=2)
MANY = 1000
"""Far more than credit allows."""

half_open = Proxy.half_open


def deaf(proxy: Proxy) -> None:
    """What callers say is lost."""
    proxy.drop(Direction.TO_SERVER)


def mute(proxy: Proxy) -> None:
    """What is answered is lost."""
    proxy.drop(Direction.TO_CLIENT)


@pytest.fixture
def net() -> Iterator[HopNet]:
    net = HopNet()
    net.start()
    yield net
    net.stop()


@pytest.fixture
def sockets(net: HopNet) -> Sockets:
    """As a stage makes them of its settings."""
    return Sockets(
        bind=f"tcp://{net.settings['SHARDLINE_HOP_BIND']}",
        advertise=net.settings["SHARDLINE_HOP_HOST"],
        ports=parse_ports(net.settings["SHARDLINE_HOP_PORTS"]),
    )


@pytest.fixture
def pipes(sockets: Sockets) -> Iterator[Pipes]:
    with open_pipes(sockets) as pipes:
        yield pipes


@pytest.fixture
def hop(sockets: Sockets) -> Iterator[ZeroMqHop]:
    yield ZeroMqHop(sockets, TIMES)
    sockets.close()


def behind(net: HopNet, address: str) -> Proxy:
    """The proxy through which this address is called."""
    return net.proxies[int(address.rpartition(":")[2])]


def frame(step: int, tensor: bytes = b"") -> Frame:
    return Frame(
        kind=CHANNEL.kind,
        pipeline=CHANNEL.pipeline,
        epoch=CHANNEL.epoch,
        step=step,
        message=b"step",
        tensor=memoryview(tensor) if tensor else None,
        dtype="float32" if tensor else "",
        shape=(len(tensor) // 4,) if tensor else (),
    )


def flood(sender: Sender, tensor: bytes = b"", *, first: int = 0) -> None:
    """More than any credit."""
    for step in range(first, MANY):
        sender.send(frame(step, tensor))


def newest(stage: Stage, epoch: int) -> Wiring:
    """The wiring of this epoch."""
    while (wiring := stage.wirings.get(timeout=PATIENCE_S)).epoch != epoch:
        pass
    return wiring


@pytest.mark.parametrize("condition", [half_open, deaf, mute])
def test_a_new_epoch_passes_steps_once_a_bad_control_link_clears(
    net: HopNet, pipes: Pipes, condition: Callable[[Proxy], None]
) -> None:
    stage = pipes.stage(8, NUM_LAYERS, TIMES)
    head = pipes.head(8, TIMES)
    before = head.ready()
    proxy = behind(net, stage.link.card().control)

    condition(proxy)
    reason = head.losses.get(timeout=PATIENCE_S)
    proxy.clear()

    assert "silent for" in reason or "closed" in reason
    after = head.ready()
    assert after.epoch > before.epoch
    pass_a_step(after.pipeline, [after, newest(stage, after.epoch)], 0)


def test_a_pipeline_over_links_of_100_ms_stays_and_passes_steps(net: HopNet, pipes: Pipes) -> None:
    for proxy in net.proxies.values():
        proxy.delay(0.1, 0.05)
    patient = TIMES.model_copy(update={"link_dead_s": 8.0, "unbind_s": 8.0})
    stage = pipes.stage(8, NUM_LAYERS, patient)
    head = pipes.head(8, patient)

    wirings = [head.ready(), stage.wirings.get(timeout=PATIENCE_S)]
    for step in range(4):
        pass_a_step(wirings[0].pipeline, wirings, step)

    assert head.losses.empty()


@pytest.mark.parametrize("condition", [half_open, deaf, mute])
def test_the_receiver_of_a_bad_hop_notices_the_missing_heartbeat(
    net: HopNet, hop: ZeroMqHop, condition: Callable[[Proxy], None]
) -> None:
    receiver = hop.open_receiver(CHANNEL)
    sender = hop.open_sender(CHANNEL, receiver.address, PATIENCE_S)
    sender.send(frame(0))
    assert receiver.receive(PATIENCE_S) is not None

    condition(behind(net, receiver.address))

    with pytest.raises(LinkLost, match="the connection was closed"):
        receiver.receive(PATIENCE_S)
    sender.close()
    receiver.close()


def test_no_frame_is_skipped_in_silence_when_its_connection_breaks(
    net: HopNet, hop: ZeroMqHop
) -> None:
    receiver = hop.open_receiver(CHANNEL)
    sender = hop.open_sender(CHANNEL, receiver.address, PATIENCE_S)
    sender.send(frame(0))
    # Now both know each other: a sender is ready a moment before.
    assert receiver.receive(PATIENCE_S) is not None
    proxy = behind(net, receiver.address)
    deaf(proxy)
    sender.send(frame(1))
    sender.send(frame(2))

    proxy.cut()
    proxy.clear()

    with pytest.raises(LinkLost, match="no steps after 0"):
        receiver.receive(PATIENCE_S)
    with pytest.raises(LinkLost, match=r"step \d+ could not be sent"):
        flood(sender, first=3)
    sender.close()
    receiver.close()


def test_a_sender_out_of_credit_calls_its_slow_reader_dead(net: HopNet, hop: ZeroMqHop) -> None:
    receiver = hop.open_receiver(CHANNEL)
    sender = hop.open_sender(CHANNEL, receiver.address, PATIENCE_S)
    behind(net, receiver.address).slow(10_000)

    with pytest.raises(LinkLost, match=r"step \d+ could not be sent"):
        flood(sender, bytes(4 << 20))
    sender.close()
    receiver.close()
