"""Staging buffers on the test accelerator, whose copies from and to pinned memory really are done
later."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import UUID

import pytest
import torch

from services.stage.device.accelerator import STREAM_PARTS, load_module
from services.stage.device.acquire import acquire
from services.stage.device.device import Device
from services.stage.device.staging import Staging
from services.stage.engine.tensors import name_of, view_of
from services.stage.hop import Channel, Frame, Kind
from services.stage.hop.sockets import Sockets
from services.stage.hop.zeromq import LEND_FROM_BYTES, ZeroMqHop
from shardline.base.config import Times
from tests.pinned import first_core

NUM_LANES = 2
SHAPE = (LEND_FROM_BYTES // 4 // 64, 64)
"""Of float32 activations that ZeroMQ is lent."""
PATIENCE_S = 60.0


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    load_module("tests.accelerator")
    device = acquire("toy:0", worker="tests", lock_folder=tmp_path)
    yield device
    device.release()


@pytest.fixture
def toy(device: Device) -> ModuleType:
    return sys.modules["tests.accelerator.toy"]


@pytest.fixture
def staging(device: Device) -> Staging:
    staging = device.staging(NUM_LANES + 1, LEND_FROM_BYTES)
    assert staging is not None
    return staging


def states_of(step: int, device: Device) -> torch.Tensor:
    return torch.full(SHAPE, float(step), device=device.torch_device)


def test_operators_after_a_copy_do_not_wait_for_it(
    toy: ModuleType, device: Device, staging: Staging
) -> None:
    staging.buffer(0).zero_()
    states = states_of(7, device)
    with toy.copies_to_host_held():
        copy = staging.copy_out(0, states)
        following = (states + 1).cpu()
        assert copy.tensor is not None
        assert copy.tensor.sum() == 0, "it is not copied yet"
    copy.wait()

    assert (following == 8).all()
    assert (copy.tensor == 7).all()


def test_activations_stay_until_they_are_copied_though_nobody_else_holds_them(
    toy: ModuleType, device: Device, staging: Staging
) -> None:
    with toy.copies_to_host_held():
        copy = staging.copy_out(0, states_of(7, device))
    copy.wait()

    assert copy.tensor is not None
    assert (copy.tensor == 7).all()


def test_a_copy_waits_for_what_the_device_was_given_before(
    device: Device, staging: Staging
) -> None:
    received = staging.buffer(0).view(torch.float32).view(SHAPE).fill_(7)

    copy = staging.copy_out(0, received.to(device.torch_device, non_blocking=True))
    copy.wait()

    assert copy.tensor is not None
    assert (copy.tensor == 7).all()


def test_one_buffer_brings_a_step_in_and_out_and_comes_around(
    device: Device, staging: Staging
) -> None:
    buffers = [staging.buffer(step) for step in range(2 * (NUM_LANES + 1))]

    assert all(buffer.is_pinned() for buffer in buffers)
    assert [buffer.data_ptr() for buffer in buffers[: NUM_LANES + 1]] == [
        buffer.data_ptr() for buffer in buffers[NUM_LANES + 1 :]
    ]
    assert len({buffer.data_ptr() for buffer in buffers}) == NUM_LANES + 1
    copy = staging.copy_out(1, states_of(1, device))
    assert copy.tensor is not None
    assert copy.tensor.data_ptr() == buffers[1].data_ptr()
    copy.wait()


def test_lent_buffers_arrive_whole_while_the_credit_is_used_up(
    tmp_path: Path, device: Device, staging: Staging
) -> None:
    sockets = Sockets(bind=f"ipc://{tmp_path}")
    hop = ZeroMqHop(sockets, Times())
    channel = Channel(pipeline=UUID(int=1), epoch=1, kind=Kind.PLAN, num_lanes=2)
    receiver = hop.open_receiver(channel)
    sender = hop.open_sender(channel, receiver.address, PATIENCE_S)
    for step in range(4 * (NUM_LANES + 1)):
        copy = staging.copy_out(step, states_of(step, device))
        copy.wait()
        assert copy.tensor is not None
        activations: Any = {
            "tensor": view_of(copy.tensor),
            "dtype": name_of(copy.tensor.dtype),
            "shape": SHAPE,
        }
        sender.send(
            Frame(
                kind=Kind.PLAN, pipeline=UUID(int=1), epoch=1, step=step, message=b"", **activations
            )
        )
        if step >= NUM_LANES:
            received = receiver.receive(PATIENCE_S)
            assert received is not None
            assert received.tensor is not None
            assert (
                torch.frombuffer(received.tensor, dtype=torch.float32) == step - NUM_LANES
            ).all()
    sender.close()
    receiver.close()
    sockets.close()


@pytest.mark.parametrize("part", STREAM_PARTS)
def test_a_backend_without_streams_or_events_copies_with_waits(
    part: str, toy: ModuleType, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(toy, part)

    assert device.staging(2, 64) is None


def test_cores_have_no_staging(tmp_path: Path) -> None:
    with first_core(tmp_path) as cores:
        assert cores.staging(2, 64) is None
