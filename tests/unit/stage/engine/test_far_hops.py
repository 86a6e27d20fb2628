"""Engines over hops that are far: activations as int8, and more steps in flight than stages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.stage.engine.executor import Executor
from services.stage.engine.tensors import INT8_MAX, quantized
from shardline.contract.job import SamplingParams
from shardline_scheduler.step_plan import StepPlan, StepResult
from tests.chain import generate, load_chain, requests
from tests.engines import open_engines
from tests.models import VOCAB_SIZE, save_model
from tests.pinned import first_core

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
BUDGET = 32


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Executor]]:
    """A model of six layers in two stages."""
    folder = save_model(tmp_path_factory.mktemp("model"), num_hidden_layers=6)
    with first_core(tmp_path_factory.mktemp("locks")) as core:
        yield load_chain(folder, 2, core, folder)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in (1, 3, 70, 17, 41, 9)
    ]


def test_a_rounded_hop_gives_the_tokens_of_rounded_states(
    stages: list[Executor],
    prompts: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = stages[0].run

    def rounded(plan: StepPlan, hidden: Tensor | None) -> Any:
        states = run(plan, hidden)
        assert not isinstance(states, StepResult)
        scales = states.abs().amax(dim=1, keepdim=True) / INT8_MAX
        return quantized(states)[:, :-4].float() * scales

    with monkeypatch.context() as patch:
        patch.setattr(stages[0], "run", rounded)
        expected = generate(stages, requests(prompts, GREEDY), budget=BUDGET)

    with open_engines(stages, tmp_path, budget=BUDGET, sends_int8=True) as engines:
        assert engines.generate(requests(prompts, GREEDY)) == expected


@pytest.mark.parametrize("num_lanes", [1, 5])
def test_other_lanes_in_the_middle_of_an_epoch_change_no_token(
    num_lanes: int, stages: list[Executor], prompts: list[list[int]], tmp_path: Path
) -> None:
    expected = generate(stages, requests(prompts, GREEDY), budget=BUDGET)

    with open_engines(stages, tmp_path, budget=BUDGET) as engines:
        assert engines.generate(requests(prompts, GREEDY)) == expected
        engines.head.use_lanes(num_lanes)
        assert engines.generate(requests(prompts, GREEDY)) == expected
        assert engines.head.scheduler.config.num_lanes == num_lanes
