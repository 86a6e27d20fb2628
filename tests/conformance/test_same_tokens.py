"""The same prompt and seed give the same tokens however they run: alone, crowded, cut otherwise,
resumed, sharded."""

from __future__ import annotations

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
from tests.chain import Guesses, Pressure, complete, generate, load_chain, requests
from tests.models import VOCAB_SIZE, save_model

NUM_NEW = 24
NUM_PROMPTS = 32
BUDGET = 200
MIB = 1 << 20
WARM = SamplingParams(max_tokens=NUM_NEW, temperature=0.8)
MODELS = ("llama", "gemma2", "qwen3-moe")
"""Dense; sliding window with softcaps; experts."""

KINDS = [
    *((name, dtype) for name in MODELS for dtype in ("float32", "bfloat16")),
    ("llama", "int8"),
    ("llama", "int4"),
]

pytestmark = pytest.mark.parametrize(("name", "dtype"), KINDS)


@cache
def batch() -> list[Request]:
    """32 prompts of 1 to 156 tokens, each with its own seed."""
    generator = torch.Generator().manual_seed(2)
    lengths = range(1, 5 * NUM_PROMPTS, 5)
    return requests(
        (torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths), WARM
    )


@pytest.fixture(scope="module")
def chains(model_folder: Path, device: Device) -> dict[tuple[str, str, int], list[Executor]]:
    """Every model, dtype and number of stages, loaded once."""
    paths = {name: save_model(model_folder / "same", name) for name in MODELS}
    return {
        (name, dtype, num_stages): load_chain(
            paths[name],
            num_stages,
            device,
            model_folder,
            dtype=dtype,
            offload_bytes=MIB,
            offload_folder=folder,
        )
        for name, dtype in KINDS
        for num_stages, folder in ((1, None), (3, model_folder / "offload"))
    }


Chains = dict[tuple[str, str, int], list[Executor]]


@pytest.fixture
def one(chains: Chains, name: str, dtype: str) -> list[Executor]:
    """The model in one stage."""
    return chains[name, dtype, 1]


@pytest.fixture(scope="module")
def outputs() -> dict[tuple[str, str], list[tuple[int, ...]]]:
    """What each model gave in each dtype, once asked."""
    return {}


@pytest.fixture
def expected(
    one: list[Executor],
    name: str,
    dtype: str,
    outputs: dict[tuple[str, str], list[tuple[int, ...]]],
) -> list[tuple[int, ...]]:
    """All prompts in a batch of 32."""
    if (name, dtype) not in outputs:
        outputs[name, dtype] = generate(one, batch(), budget=BUDGET)
    return outputs[name, dtype]


def test_prompts_alone_have_the_tokens_of_the_batch(
    one: list[Executor], expected: list[tuple[int, ...]]
) -> None:
    assert [generate(one, [request], budget=BUDGET)[0] for request in batch()[::4]] == expected[::4]


@pytest.mark.parametrize(("budget", "seats"), [(16, 3), (37, 32), (512, 7)])
def test_other_budgets_and_seats_give_the_same_tokens(
    budget: int, seats: int, one: list[Executor], expected: list[tuple[int, ...]]
) -> None:
    assert generate(one, batch(), budget=budget, seats=seats) == expected


@pytest.mark.parametrize("num_kept", [1, 11, NUM_NEW - 1])
def test_resumed_jobs_go_on_with_the_same_tokens(
    num_kept: int, one: list[Executor], expected: list[tuple[int, ...]]
) -> None:
    resumed = [
        Request(
            key=r.key,
            prompt_ids=r.prompt_ids,
            params=r.params,
            seed=r.seed,
            output_ids=output[:num_kept],
        )
        for r, output in zip(batch(), expected, strict=True)
    ]

    assert generate(one, resumed, budget=BUDGET) == expected


@pytest.mark.parametrize("num_stages", [1, 3])
def test_prompts_that_find_kv_of_others_have_the_same_bits(
    num_stages: int, chains: Chains, name: str, dtype: str, one: list[Executor]
) -> None:
    common = tuple(3 + 7 * place % 90 for place in range(2 * BLOCK_TOKENS + 9))
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.8, logprobs=2)
    jobs = [replace(job, prompt_ids=common + job.prompt_ids, params=params) for job in batch()[::2]]
    expected = complete(one, jobs, budget=BUDGET, seats=3, prefix_cache=False)

    found = complete(chains[name, dtype, num_stages], jobs, budget=BUDGET, seats=3)

    assert {end.num_cached for end in found[3:]} == {2 * BLOCK_TOKENS}
    assert [(end.output_ids, end.logprobs) for end in found] == [
        (end.output_ids, end.logprobs) for end in expected
    ]


@pytest.mark.parametrize("num_stages", [1, 3])
def test_jobs_whose_kv_was_offloaded_have_the_same_bits(
    num_stages: int, chains: Chains, name: str, dtype: str, one: list[Executor]
) -> None:
    params = SamplingParams(max_tokens=2 * NUM_NEW, temperature=0.8, logprobs=2)
    jobs = [replace(job, prompt_ids=job.prompt_ids * 2, params=params) for job in batch()[20:]]
    expected = complete(one, jobs, budget=BUDGET, seats=12, prefix_cache=False)
    pressure = Pressure(
        num_blocks=16,
        num_slots=min(stage.offload.num_slots for stage in chains[name, dtype, num_stages]),
    )

    found = complete(
        chains[name, dtype, num_stages], jobs, budget=BUDGET, seats=12, pressure=pressure
    )

    assert {move.is_out for move in pressure.moves} == {True, False}
    assert [(end.output_ids, end.logprobs) for end in found] == [
        (end.output_ids, end.logprobs) for end in expected
    ]


@cache
def repetitive() -> list[Request]:
    """Prompts that say a few tokens over and over, and with parameters of every kind."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.05},
        {"temperature": 0.1, "top_p": 0.9, "logprobs": 3},
        {
            "temperature": 0.0,
            "logprobs": 2,
            "min_tokens": 20,
            "stop_token_ids": tuple(range(3, 40)),
        },
        {
            "temperature": 0.0,
            "repetition_penalty": 1.05,
            "presence_penalty": 0.05,
            "frequency_penalty": 0.01,
        },
    ]
    generator = torch.Generator().manual_seed(5)
    rounds = [
        torch.randint(3, VOCAB_SIZE, (2 + place % 7,), generator=generator).tolist()
        for place in range(10)
    ]
    return [
        Request(
            key=(str(place), 1),
            prompt_ids=tuple((tokens * 80)[: 50 + 5 * place]),
            params=SamplingParams(max_tokens=2 * NUM_NEW, **kinds[place % len(kinds)]),
            seed=place,
        )
        for place, tokens in enumerate(rounds)
    ]


@pytest.mark.parametrize("num_stages", [1, 3])
def test_guesses_that_come_true_or_not_change_no_bit(
    num_stages: int, chains: Chains, name: str, dtype: str, one: list[Executor]
) -> None:
    expected = complete(one, repetitive(), budget=BUDGET, seats=10)
    guesses = Guesses()

    found = complete(
        chains[name, dtype, num_stages], repetitive(), budget=BUDGET, seats=3, guesses=guesses
    )

    assert 0 < guesses.num_true < guesses.num_made
    assert [(end.output_ids, end.logprobs) for end in found] == [
        (end.output_ids, end.logprobs) for end in expected
    ]


def test_three_stages_give_the_same_tokens(
    chains: Chains, name: str, dtype: str, expected: list[tuple[int, ...]]
) -> None:
    three = chains[name, dtype, 3]

    assert generate(three, batch(), budget=64) == expected
    assert all(stage.exact for stage in three)
    assert len({stage.fingerprint for stage in (*three, *chains[name, dtype, 1])}) == 1


def test_other_seeds_give_other_tokens(
    one: list[Executor], expected: list[tuple[int, ...]]
) -> None:
    request = batch()[8]
    other = Request(
        key=request.key, prompt_ids=request.prompt_ids, params=request.params, seed=request.seed + 1
    )

    assert generate(one, [other], budget=BUDGET) != [expected[8]]
