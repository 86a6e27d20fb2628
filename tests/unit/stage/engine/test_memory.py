"""Which layers a stage streams, and how it divides the memory of KV."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.stage.device.device import Device
from services.stage.device.memory_reservations import MemoryReservations
from services.stage.engine.memory import Limits, StageMemory, WeightBytes, num_blocks, num_slots
from shardline.base.errors import Invalid
from shardline.contract.fleet.stage_memory import PACKING_FACTOR
from tests.pinned import first_core
from tests.unit.stage.engine.fake_gpu import GIB, FakeGpu

MIB = 1 << 20
EIGHT = WeightBytes(100 * MIB, dict.fromkeys(range(4, 12), 10 * MIB))
"""Layers of 10 MiB each, beside ends of 20."""


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    with first_core(tmp_path) as device:
        yield device


def chosen(device: Device, **limits: Any) -> tuple[int, ...]:
    """The layers that a stage with these limits streams of the eight."""
    memory = StageMemory(Limits(token_budget=64, max_open=2, **limits), device)
    return memory.fit_weights(EIGHT)


def test_streamed_layers_are_far_apart_and_leave_two_buffers_in_memory() -> None:
    streamed = EIGHT.spread(4)

    assert streamed == (5, 7, 9, 11)
    assert EIGHT.held(streamed) == 80 * MIB


@pytest.mark.parametrize(
    ("limit_mib", "num"), [(100, 0), (99, 4), (80, 4), (60, 6), (40, 8), (1, 8)]
)
def test_no_more_layers_are_streamed_than_must_be(limit_mib: int, num: int) -> None:
    assert len(EIGHT.least_streamed(limit_mib * MIB)) == num


def test_a_stage_streams_what_its_limit_leaves_no_room_for(device: Device) -> None:
    assert chosen(device, kv_bytes=20 * MIB, memory_bytes=130 * MIB, streamed_layers="auto") == ()
    assert (
        len(chosen(device, kv_bytes=20 * MIB, memory_bytes=90 * MIB, streamed_layers="auto")) == 6
    )


def test_without_a_size_of_kv_its_share_is_kept_free(device: Device) -> None:
    limits = {"kv_bytes": None, "memory_bytes": 140 * MIB, "streamed_layers": "auto"}

    assert len(chosen(device, **limits, kv_share=0.4)) == 4
    assert chosen(device, **limits, kv_share=0.1) == ()


def test_a_number_by_hand_is_taken_up_to_all_layers(device: Device) -> None:
    assert len(chosen(device, kv_bytes=None, streamed_layers=3)) == 3
    assert len(chosen(device, kv_bytes=None, streamed_layers=99)) == 8


def test_what_cannot_fit_is_refused_with_the_remedy(device: Device) -> None:
    with pytest.raises(
        Invalid, match=r"100\.0 MiB.* 90\.0 MiB are free.*SHARDLINE_STREAMED_LAYERS=auto"
    ):
        chosen(device, kv_bytes=None, memory_bytes=90 * MIB)
    with pytest.raises(
        Invalid, match=r"weights but for 8 streamed layers \(40\.0 MiB\).* 30\.0 MiB are free"
    ):
        chosen(device, kv_bytes=None, memory_bytes=30 * MIB, streamed_layers="auto")


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[Device]:
    """Of 8 GiB, beside this host's memory."""
    gpu = FakeGpu(tmp_path)
    yield gpu
    gpu.release()


def test_an_accelerators_streamed_layers_are_promised_of_the_hosts_memory(
    gpu: Device, tmp_path: Path
) -> None:
    assert len(chosen(gpu, kv_bytes=20 * MIB, streamed_layers=4)) == 4

    others = MemoryReservations(tmp_path)
    assert others.others() == int(EIGHT.held((5, 7, 9, 11)) * PACKING_FACTOR) + 20 * MIB + 40 * MIB
    others.release()


def test_an_accelerators_layers_that_the_host_cannot_hold_are_refused(gpu: Device) -> None:
    many = WeightBytes(3000 * GIB * 3, dict.fromkeys(range(3000), 3 * GIB))
    memory = StageMemory(
        Limits(kv_bytes=MIB, token_budget=64, max_open=2, streamed_layers=3000), gpu
    )

    with pytest.raises(
        Invalid, match=r"STREAMED_LAYERS: 3000 streamed layers of cuda:0 .*host's memory.* are free"
    ):
        memory.fit_weights(many)


def test_a_layer_without_tiles_is_never_streamed() -> None:
    assert WeightBytes(100, {0: 0, 1: 0}).spread(2) == ()


def test_states_take_half_of_the_memory_of_kv_at_most() -> None:
    assert num_slots(10, 100, max_open=64) == 5
    assert num_slots(10, 10_000, max_open=64) == 64
    with pytest.raises(Invalid, match="holds no sequence's"):
        num_slots(60, 100, max_open=64)


def test_a_stage_without_attention_has_blocks_that_take_no_memory() -> None:
    assert num_blocks({}, torch.float32, 0, context=640, max_open=4) == 40
