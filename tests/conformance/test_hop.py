"""What every hop must do, on each of its transports. A new implementation joins by a line in
TRANSPORTS."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
import zmq

from services.stage.hop import Channel, Frame, Hop, Kind, Receiver, Sender
from services.stage.hop.sockets import CurveKeys, Sockets
from services.stage.hop.zeromq import LEND_FROM_BYTES, ZeroMqHop
from shardline.base.config import Times
from shardline.base.errors import LinkLost, ProtocolError

PIPELINE = UUID("11111111-2222-3333-4444-555555555555")
CHANNEL = Channel(pipeline=PIPELINE, epoch=7, kind=Kind.PLAN, num_lanes=2)
PATIENCE_S = 60.0
A_MOMENT_S = 0.01


def _tcp(_folder: Path) -> Sockets:
    return Sockets(bind="tcp://127.0.0.1")


def _ipc(folder: Path) -> Sockets:
    return Sockets(bind=f"ipc://{folder}")


def _curve(_folder: Path) -> Sockets:
    public, secret = zmq.curve_keypair()
    return Sockets(
        bind="tcp://127.0.0.1", curve=CurveKeys(public=public, secret=secret, server=public)
    )


TRANSPORTS: dict[str, Callable[[Path], Sockets]] = {"tcp": _tcp, "ipc": _ipc, "curve": _curve}


@pytest.fixture(params=TRANSPORTS)
def sockets(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sockets]:
    sockets = TRANSPORTS[request.param](tmp_path)
    yield sockets
    sockets.close()


@pytest.fixture
def hop(sockets: Sockets) -> Hop:
    return ZeroMqHop(sockets, Times())


@pytest.fixture
def receiver(hop: Hop) -> Iterator[Receiver]:
    receiver = hop.open_receiver(CHANNEL)
    yield receiver
    receiver.close()


@pytest.fixture
def sender(hop: Hop, receiver: Receiver) -> Iterator[Sender]:
    sender = hop.open_sender(CHANNEL, receiver.address, PATIENCE_S)
    yield sender
    sender.close()


def plan(step: int, *, epoch: int = CHANNEL.epoch, num_bytes: int = 4096) -> Frame:
    tensor = memoryview(bytes([step % 251]) * num_bytes)
    return Frame(
        kind=Kind.PLAN,
        pipeline=PIPELINE,
        epoch=epoch,
        step=step,
        message=f"plan {step}".encode(),
        tensor=tensor,
        dtype="bfloat16",
        shape=(num_bytes // 16, 8),
    )


def send_many(sender: Sender, num_steps: int, *, num_bytes: int = 4096) -> None:
    for step in range(num_steps):
        sender.send(plan(step, num_bytes=num_bytes))


def test_frames_arrive_whole_and_in_order(sender: Sender, receiver: Receiver) -> None:
    for step in range(20):
        sender.send(plan(step))

        assert receiver.receive(PATIENCE_S) == plan(step)


def test_a_frame_without_a_tensor_arrives(sender: Sender, receiver: Receiver) -> None:
    frame = replace(plan(0), tensor=None, dtype="", shape=())
    sender.send(frame)

    assert receiver.receive(PATIENCE_S) == frame


def test_a_large_tensor_arrives(sender: Sender, receiver: Receiver) -> None:
    frame = plan(0, num_bytes=5 * LEND_FROM_BYTES)
    sender.send(frame)

    assert receiver.receive(PATIENCE_S) == frame


def test_the_whole_credit_fits_while_nobody_receives(sender: Sender, receiver: Receiver) -> None:
    for start in range(0, 30, CHANNEL.num_lanes + 1):
        steps = range(start, start + CHANNEL.num_lanes + 1)
        for step in steps:
            sender.send(plan(step))

        assert [receiver.receive(PATIENCE_S) for _ in steps] == [plan(step) for step in steps]


def test_nothing_comes_after_the_timeout(receiver: Receiver) -> None:
    assert receiver.receive(A_MOMENT_S) is None


def test_a_wake_from_another_thread_ends_the_wait(receiver: Receiver) -> None:
    waker = threading.Thread(target=receiver.wake)
    waker.start()

    assert receiver.receive(PATIENCE_S) is None
    waker.join()


def test_a_wake_does_not_cost_a_frame(sender: Sender, receiver: Receiver) -> None:
    sender.send(plan(0))
    receiver.wake()

    frames = [receiver.receive(PATIENCE_S), receiver.receive(PATIENCE_S)]

    assert plan(0) in frames
    assert None in frames


def test_a_wake_after_close_does_nothing(receiver: Receiver) -> None:
    receiver.close()
    receiver.close()

    receiver.wake()


@pytest.mark.parametrize(
    "steps", [[1], [0, 0], [0, 2], [0, 1, 0]], ids=["late start", "repeat", "gap", "step back"]
)
def test_steps_that_are_not_contiguous_lose_the_link(
    sender: Sender, receiver: Receiver, steps: list[int]
) -> None:
    for step in steps:
        sender.send(plan(step))
    for step in steps[:-1]:
        assert receiver.receive(PATIENCE_S) == plan(step)

    with pytest.raises(LinkLost, match="was due"):
        receiver.receive(PATIENCE_S)


def test_frames_of_an_older_epoch_are_dropped(sender: Sender, receiver: Receiver) -> None:
    sender.send(plan(0, epoch=CHANNEL.epoch - 1))
    sender.send(plan(0))

    assert receiver.receive(PATIENCE_S) == plan(0)


def test_a_frame_of_a_newer_epoch_loses_the_link(sender: Sender, receiver: Receiver) -> None:
    sender.send(plan(0, epoch=CHANNEL.epoch + 1))

    with pytest.raises(LinkLost, match="epoch 8"):
        receiver.receive(PATIENCE_S)


def test_a_frame_of_another_pipeline_is_refused(sender: Sender, receiver: Receiver) -> None:
    sender.send(replace(plan(0), pipeline=UUID(int=1)))

    with pytest.raises(ProtocolError, match="pipeline"):
        receiver.receive(PATIENCE_S)


def test_a_frame_of_the_wrong_kind_is_refused(sender: Sender, receiver: Receiver) -> None:
    sender.send(replace(plan(0), kind=Kind.RESULT))

    with pytest.raises(ProtocolError, match="RESULT frame on a link for PLAN"):
        receiver.receive(PATIENCE_S)


def test_a_sender_that_closes_loses_the_link(sender: Sender, receiver: Receiver) -> None:
    sender.send(plan(0))
    assert receiver.receive(PATIENCE_S) == plan(0)

    sender.close()

    with pytest.raises(LinkLost, match="closed"):
        receiver.receive(PATIENCE_S)


def test_sending_to_a_closed_receiver_loses_the_link(sender: Sender, receiver: Receiver) -> None:
    receiver.close()

    with pytest.raises(LinkLost, match="could not be sent"):
        send_many(sender, 1_000_000)


def test_sending_more_than_the_peer_takes_loses_the_link_instead_of_blocking(
    sender: Sender,
) -> None:
    with pytest.raises(LinkLost, match="takes nothing more"):
        send_many(sender, 10_000, num_bytes=1 << 20)


def test_room_that_is_gone_between_the_poll_and_the_send_loses_the_link(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll = zmq.Socket.poll

    def finds_room(socket: zmq.Socket[bytes], timeout_ms: int, flags: int = zmq.POLLIN) -> int:
        return flags if flags == zmq.POLLOUT else poll(socket, timeout_ms, flags)

    monkeypatch.setattr(zmq.Socket, "poll", finds_room)

    with pytest.raises(LinkLost, match="could not be sent"):
        send_many(sender, 10_000, num_bytes=1 << 20)


def test_a_sender_without_a_receiver_is_refused(hop: Hop, receiver: Receiver) -> None:
    scheme, _, endpoint = receiver.address.partition("://")
    nobody = f"tcp://{endpoint.split(':')[0]}:1" if scheme == "tcp" else f"ipc://{endpoint}-nobody"

    with pytest.raises(LinkLost, match="no link to"):
        hop.open_sender(CHANNEL, nobody, PATIENCE_S)


@pytest.mark.parametrize(
    "parts", [[b"x"], [b"x"] * 2, [b"x"] * 3, [b"x"] * 50, [b""], [b"\0" * 72, b"", b""]]
)
def test_garbage_is_refused_and_the_process_lives(
    sockets: Sockets, receiver: Receiver, parts: list[bytes]
) -> None:
    intruder, watch = sockets.connect(zmq.PUSH, receiver.address, {}, PATIENCE_S)
    intruder.send_multipart(parts)

    with pytest.raises(ProtocolError):
        receiver.receive(PATIENCE_S)
    watch.close()
    intruder.close()


def test_a_stranger_who_speaks_no_zeromq_disturbs_nobody(
    sender: Sender, receiver: Receiver
) -> None:
    strangers = "import sys, socket; kind, endpoint = sys.argv[1:]; " + (
        "s = socket.socket(getattr(socket, kind)); "
        "s.connect(endpoint if kind == 'AF_UNIX'"
        " else (endpoint.split(':')[0], int(endpoint.split(':')[1]))); "
        "s.sendall(b'GET / HTTP/1.0\\r\\n\\r\\n' * 10); s.close()"
    )
    scheme, _, endpoint = receiver.address.partition("://")
    subprocess.run(
        [sys.executable, "-c", strangers, "AF_UNIX" if scheme == "ipc" else "AF_INET", endpoint],
        check=True,
    )

    assert receiver.receive(A_MOMENT_S * 10) is None
    sender.send(plan(0))
    assert receiver.receive(PATIENCE_S) == plan(0)


def test_without_the_keys_nobody_connects(tmp_path: Path) -> None:
    guarded = _curve(tmp_path)
    stranger = _curve(tmp_path)
    unkeyed = _tcp(tmp_path)
    receiver = ZeroMqHop(guarded, Times()).open_receiver(CHANNEL)

    for sockets in (stranger, unkeyed):
        with pytest.raises(LinkLost, match="no link to"):
            ZeroMqHop(sockets, Times()).open_sender(CHANNEL, receiver.address, 1.0)
        sockets.close()

    receiver.close()
    guarded.close()
