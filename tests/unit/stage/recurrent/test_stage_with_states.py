"""A stage divides its memory between states and KV, runs no more sequences than it has states for,
and refuses what a state cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.stage.device.device import Device
from shardline.base.errors import Invalid
from shardline.contract.job import SamplingParams
from tests.chain import generate, load_chain, requests
from tests.models import save_model
from tests.pinned import first_core

KIB = 1 << 10


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    with first_core(tmp_path) as device:
        yield device


def test_jobs_wait_for_one_of_few_states(tmp_path: Path, device: Device) -> None:
    # Given memory whose half holds two states of some 30 KiB
    path = save_model(tmp_path, "granitemoehybrid")
    stages = load_chain(path, 1, device, tmp_path, kv_bytes=160 * KIB)
    assert [stage.num_states for stage in stages] == [2]
    jobs = requests([[3 + place, 4, 5] for place in range(7)], SamplingParams(max_tokens=5))

    together = generate(stages, jobs, budget=64, seats=8)

    assert together == [generate(stages, [job], budget=64)[0] for job in jobs]


def test_states_are_not_offloaded(tmp_path: Path, device: Device) -> None:
    path = save_model(tmp_path, "lfm2")
    with pytest.raises(Invalid, match="keeps recurrent states, which are not offloaded"):
        load_chain(path, 1, device, tmp_path, offload_bytes=KIB)
