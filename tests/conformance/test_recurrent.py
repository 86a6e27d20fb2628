"""Sequences of models with recurrent layers have the same tokens and log-probabilities however they
run: alone, crowded, cut otherwise, resumed, preempted, sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from services.stage.device.device import Device
from services.stage.engine.executor import Executor
from shardline.contract.job import SamplingParams
from shardline_scheduler.kv_blocks import BLOCK_TOKENS
from shardline_scheduler.sequence import Request
from tests.chain import Guesses, Pressure, complete, load_chain, requests
from tests.models import VOCAB_SIZE, save_model

NUM_NEW = 12
NUM_PROMPTS = 32
BUDGET = 200
WARM = SamplingParams(max_tokens=NUM_NEW, temperature=0.8, logprobs=2)
KINDS = [
    ("lfm2", "bfloat16"),
    ("lfm2", "int8"),
    ("granitemoehybrid", "bfloat16"),
    ("qwen3-next", "float32"),
]
"""A short convolution; Mamba-2's state; the gated delta rule's, beside a mixture."""

pytestmark = pytest.mark.parametrize(("name", "dtype"), KINDS)

Outcome = list[tuple[tuple[int, ...], Any]]


@cache
def batch() -> list[Request]:
    """32 prompts of 1 to 156 tokens, each with its own seed."""
    generator = torch.Generator().manual_seed(2)
    lengths = range(1, 5 * NUM_PROMPTS, 5)
    prompts = (torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths)
    return requests(prompts, WARM)


LoadStages = Callable[[str, str, int], list[Executor]]
"""Takes a model's name, a dtype and a number of stages."""


@pytest.fixture(scope="module")
def stages_of(model_folder: Path, device: Device) -> LoadStages:
    """Loads each kind once, when it is first asked for."""

    @cache
    def load(name: str, dtype: str, num: int) -> list[Executor]:
        path = save_model(model_folder / "recurrent", name)
        return load_chain(path, num, device, model_folder, dtype=dtype)

    return load


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, str], Outcome]:
    """What each kind gave, once asked."""
    return {}


@pytest.fixture
def one(stages_of: LoadStages, name: str, dtype: str) -> list[Executor]:
    """The model in one stage."""
    return stages_of(name, dtype, 1)


@pytest.fixture
def expected(
    one: list[Executor], name: str, dtype: str, known: dict[tuple[str, str], Outcome]
) -> Outcome:
    """All prompts in a batch of 32."""
    if (name, dtype) not in known:
        known[name, dtype] = outcome(one, batch(), seats=NUM_PROMPTS)
    return known[name, dtype]


def outcome(
    stages: Sequence[Executor], jobs: list[Request], *, seats: int, budget: int = BUDGET
) -> Outcome:
    """Ids and log-probabilities of each."""
    ends = complete(stages, jobs, budget=budget, seats=seats)
    assert {end.num_cached for end in ends} == {0}
    assert [stage.states_used for stage in stages] == [0] * len(stages)
    return [(end.output_ids, end.logprobs) for end in ends]


def test_rows_do_not_depend_on_neighbors_and_chunks(one: list[Executor], expected: Outcome) -> None:
    assert all(stage.exact for stage in one)
    assert [outcome(one, [job], seats=1)[0] for job in batch()[::6]] == expected[::6]
    assert outcome(one, batch(), seats=3, budget=16) == expected
    assert outcome(one, batch(), seats=7, budget=37) == expected


def test_three_stages_give_the_same_bits(
    stages_of: LoadStages, name: str, dtype: str, expected: Outcome
) -> None:
    three = stages_of(name, dtype, 3)

    assert outcome(three, batch(), seats=NUM_PROMPTS, budget=64) == expected
    assert all(stage.exact for stage in three)


def test_resumed_jobs_go_on_with_the_same_tokens(one: list[Executor], expected: Outcome) -> None:
    jobs = [
        replace(job, output_ids=ids[:7]) for job, (ids, _) in zip(batch(), expected, strict=True)
    ]

    found = outcome(one, jobs, seats=NUM_PROMPTS)

    assert [ids for ids, _ in found] == [ids for ids, _ in expected]


def test_preempted_sequences_are_computed_again(one: list[Executor]) -> None:
    # Given prompts of nearly a block, and one block more than there are prompts
    jobs = [replace(job, prompt_ids=job.prompt_ids[: BLOCK_TOKENS - 4]) for job in batch()[20:]]
    expected = outcome(one, jobs, seats=len(jobs))
    pressure = Pressure(num_blocks=len(jobs) + 1, num_slots=0)

    found = complete(one, jobs, budget=BUDGET, seats=len(jobs), pressure=pressure)

    assert len(pressure.opened) > len(jobs), "some were preempted"
    assert [(end.output_ids, end.logprobs) for end in found] == expected


def test_nothing_is_guessed_where_no_state_can_be_taken_back(
    one: list[Executor], expected: Outcome
) -> None:
    guesses = Guesses()
    repeated = [replace(job, prompt_ids=job.prompt_ids[:3] * 20) for job in batch()[:3]]

    complete(one, repeated, budget=BUDGET, seats=3, guesses=guesses)

    assert guesses.num_made == 0
    assert outcome(one, batch()[:2], seats=2) == expected[:2]
