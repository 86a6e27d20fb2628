"""Frames that the harness's network loses or repeats: real links, and what the taps make of
them."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import pytest

from services.stage.hop import Channel, Frame, Kind
from services.stage.hop.frame import encode as wire
from services.stage.hop.sockets import Sockets, parse_ports
from services.stage.hop.zeromq import ZeroMqHop
from shardline.base.config import Times
from shardline.base.errors import LinkLost
from shardline_scheduler.step_plan import StepResult, encode
from tests.chaos.faults.frame_faults import Answers, Lost, Repeated
from tests.chaos.network.hop_net import HopNet
from tests.chaos.network.zmtp import Tap

PATIENCE_S = 20.0
PIPELINE = UUID(int=1)
CHANNEL = Channel(pipeline=PIPELINE, epoch=1, kind=Kind.RESULT, num_lanes=2)
CHUNKS = (1, 7, 64, 1 << 16)


def answer(step: int, *tokens: int, epoch: int = 1) -> Frame:
    message = encode(StepResult(step=step, tokens=tuple((token,) for token in tokens)))
    return Frame(kind=Kind.RESULT, pipeline=PIPELINE, epoch=epoch, step=step, message=message)


def passed(answers: Answers, frame: Frame) -> bytes:
    """What becomes of a frame whose bytes on the wire stand for themselves."""
    parts = [bytes(part) for part in wire(frame)]
    return answers.pass_on(name(frame), parts)


def name(frame: Frame) -> bytes:
    return f"{frame.epoch}.{frame.step};".encode()


def zmtp(*parts: bytes) -> bytes:
    """A message as ZMTP 3 frames it."""
    flags = [*([1] * (len(parts) - 1)), 0]
    sized = zip(flags, parts, strict=True)
    return b"".join(
        bytes([flag, len(part)]) + part
        if len(part) < 256
        else bytes([flag | 2]) + len(part).to_bytes(8) + part
        for flag, part in sized
    )


@pytest.mark.parametrize("size", CHUNKS)
def test_a_tap_sees_each_whole_message_once_in_any_pieces(size: int) -> None:
    seen: list[list[bytes]] = []

    def drop_the_second(raw: bytes, parts: list[bytes]) -> bytes:
        seen.append(parts)
        return b"" if len(seen) == 2 else raw

    greeting = b"g" * 64
    command = b"\x04\x05READY"
    first = zmtp(b"a", b"b" * 300)
    last = zmtp(b"d")
    stream = greeting + command + first + zmtp(b"c") + last
    tap = Tap(drop_the_second)

    told = b"".join(tap(stream[start : start + size]) for start in range(0, len(stream), size))

    assert told == greeting + command + first + last
    assert seen == [[b"a", b"b" * 300], [b"c"], [b"d"]]


def test_an_answer_of_an_older_epoch_comes_before_the_fitting_one() -> None:
    repeated = Repeated()
    old = [answer(0, 1, 2, epoch=1), answer(1, 3, 4, epoch=1)]
    for frame in old:
        assert passed(repeated, frame) == name(frame)

    same = answer(0, 1, 2, epoch=2)
    short = answer(1, 5, epoch=2)
    other = answer(1, 5, 6, epoch=2)

    assert passed(repeated, same) == name(same)
    assert passed(repeated, short) == name(short)
    assert passed(repeated, other) == name(old[1]) + name(other)
    assert repeated.num_struck == 1


@pytest.fixture
def net() -> Iterator[HopNet]:
    net = HopNet()
    net.start()
    yield net
    net.stop()


@pytest.fixture
def hop(net: HopNet) -> Iterator[ZeroMqHop]:
    sockets = Sockets(
        bind=f"tcp://{net.settings['SHARDLINE_HOP_BIND']}",
        advertise=net.settings["SHARDLINE_HOP_HOST"],
        ports=parse_ports(net.settings["SHARDLINE_HOP_PORTS"]),
    )
    yield ZeroMqHop(sockets, Times())
    sockets.close()


def test_a_lost_answer_breaks_the_link_at_the_next_one(net: HopNet, hop: ZeroMqHop) -> None:
    lost = Lost()
    for proxy in net.proxies.values():
        proxy.tap = lambda: Tap(lost.pass_on)
    receiver = hop.open_receiver(CHANNEL)
    sender = hop.open_sender(CHANNEL, receiver.address, PATIENCE_S)

    for step in range(3):
        sender.send(answer(step, 1, 2))

    assert receiver.receive(PATIENCE_S) == answer(0, 1, 2)
    with pytest.raises(LinkLost, match="step 2 came where step 1 was due"):
        receiver.receive(PATIENCE_S)
    assert lost.num_struck == 1
    receiver.close()
    sender.close()
