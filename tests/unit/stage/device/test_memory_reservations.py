"""Stages that share a host: what one is about to take, another does not count as free."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from services.stage.attention.paged_kv import KvShape, PagedKv
from services.stage.device.device import Device
from services.stage.device.memory_reservations import MemoryReservations
from services.stage.engine.memory import Limits, StageMemory, WeightBytes
from shardline.base.errors import Invalid
from tests.pinned import first_core
from tests.repository import REPOSITORY

MIB = 1 << 20
KV_SHAPES = {0: KvShape(num_kv_heads=2, head_dim=16)}
NUM_STARTS = 1_000
ALL_BYTES = 1 << 50
"""More than any host has."""


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    """Only its memory is asked for."""
    with first_core(tmp_path) as device:
        yield device


@pytest.fixture
def other(tmp_path: Path) -> Iterator[MemoryReservations]:
    """Another stage of the host."""
    reservations = MemoryReservations(tmp_path)
    yield reservations
    reservations.release()


def test_a_promise_counts_until_it_is_kept_or_its_maker_is_gone(
    tmp_path: Path, other: MemoryReservations
) -> None:
    mine = MemoryReservations(tmp_path)
    other.make(5 * MIB)
    assert (mine.others(), mine.others(same_cgroup=True), other.others()) == (5 * MIB, 5 * MIB, 0)

    other.make(0)
    assert mine.others() == 0
    mine.make(7 * MIB)
    mine.release()
    assert other.others() == 0


def test_a_promise_of_a_dead_process_is_forgotten(
    tmp_path: Path, other: MemoryReservations
) -> None:
    code = f"""import os; from pathlib import Path
from services.stage.device.memory_reservations import MemoryReservations
MemoryReservations(Path({str(tmp_path)!r})).make({9 * MIB}); os.kill(os.getpid(), 9)"""
    subprocess.run([sys.executable, "-c", code], check=False, cwd=REPOSITORY, env=dict(os.environ))
    assert len(list(tmp_path.glob("memory-*.promise"))) == 2

    assert other.others() == 0
    assert len(list(tmp_path.glob("memory-*.promise"))) == 1


def test_stages_that_start_beside_a_reader_keep_their_promises(
    tmp_path: Path, other: MemoryReservations
) -> None:
    done = threading.Event()

    def read() -> int:
        num_read = 0
        while not done.is_set():
            num_read += other.others() >= 0
        return num_read

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        try:
            for _ in range(NUM_STARTS):
                started = MemoryReservations(tmp_path)
                started.make(MIB)
                assert other.others() == MIB
                started.release()
        finally:
            done.set()
    assert all(reader.result() > 0 for reader in readers)


def test_memory_promised_to_a_loading_stage_is_not_free(
    device: Device, other: MemoryReservations
) -> None:
    assert device.available_bytes() > 0

    other.make(ALL_BYTES)

    assert device.available_bytes() == 0


def test_a_stage_is_refused_memory_promised_to_another_with_the_figures(
    device: Device, other: MemoryReservations
) -> None:
    other.make(ALL_BYTES)

    with pytest.raises(Invalid, match=r"other stages of this host are about to take"):
        StageMemory(limits(None), device).fit_weights(WeightBytes(1024 * MIB, {}))


def limits(kv_bytes: int | None, offload_bytes: int = 0) -> Limits:
    """Of two short sequences."""
    return Limits(kv_bytes=kv_bytes, offload_bytes=offload_bytes, token_budget=64, max_open=2)


def test_a_promise_is_kept_once_the_stage_has_taken_its_memory(
    device: Device, other: MemoryReservations
) -> None:
    memory = StageMemory(limits(4 * MIB), device)
    memory.fit_weights(WeightBytes(8 * MIB, {}))
    assert other.others() > 12 * MIB

    kv = memory.make_kv(KV_SHAPES, torch.float32, context=64)

    assert other.others() == 0
    assert kv.num_blocks == min(4 * MIB // PagedKv.bytes_per_block(KV_SHAPES, torch.float32), 2)


def test_memory_for_offloaded_kv_is_promised_until_it_is_taken(
    device: Device, other: MemoryReservations
) -> None:
    memory = StageMemory(limits(4 * MIB, offload_bytes=2 * MIB), device)
    memory.fit_weights(WeightBytes(8 * MIB, {}))
    assert other.others() > 14 * MIB

    kv = memory.make_kv(KV_SHAPES, torch.float32, context=64)
    assert other.others() == 2 * MIB

    area = memory.make_offload_area(kv)
    assert other.others() == 0
    assert area.num_slots == 2 * MIB // PagedKv.bytes_per_block(KV_SHAPES, torch.float32)


def test_a_limit_is_what_weights_and_kv_share(device: Device) -> None:
    limited = Limits(kv_bytes=None, memory_bytes=16 * MIB, token_budget=64, max_open=1000)
    memory = StageMemory(limited, device)
    with pytest.raises(Invalid, match=r"16\.0 MiB are free.*SHARDLINE_MEMORY_MIB"):
        memory.fit_weights(WeightBytes(16 * MIB, {}))

    memory.fit_weights(WeightBytes(10 * MIB, {}))
    kv = memory.make_kv(KV_SHAPES, torch.float32, context=1024)

    block_bytes = PagedKv.bytes_per_block(KV_SHAPES, torch.float32)
    assert 4 * MIB < kv.num_blocks * block_bytes < 6 * MIB
