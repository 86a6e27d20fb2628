"""Tokens that a GPU draws in one launch: those that the sampler draws row by row, alone and in any
crowd.

Runs in Triton's interpreter, or compiled on the device that SHARDLINE_TEST_DEVICE names.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.stage.sampling.sampler import LEAST_TEMPERATURE, LOG2_E, Sampler
from services.stage.sampling.triton_draws import (
    NONE_DRAWN,
    NONE_LEFT,
    NOT_FINITE,
    NUM_UNIFORMS,
    RowDraw,
    TritonDraws,
)
from services.stage.sampling.uniform import uniform
from shardline.contract.job import SamplingParams
from shardline_scheduler.step_plan import Open

DEVICE = os.environ.get("SHARDLINE_TEST_DEVICE", "cpu")
VOCABULARY = 2500
DRAWS = TritonDraws(LOG2_E, LEAST_TEMPERATURE)

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.95, 0.5]),
    top_k=st.sampled_from([0, 1, 7, 200, VOCABULARY]),
    min_p=st.sampled_from([0.0, 0.01, 0.3]),
)


def rows(num: int, seed: int) -> torch.Tensor:
    """Logits of so many rows."""
    return 3 * torch.randn(num, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def drawn(logits: torch.Tensor, wanted: list[SamplingParams]) -> list[int]:
    """Tokens of rows with the seeds 0, 1, ..."""
    draws = [
        RowDraw(each, [uniform(seed, 0, proposal) for proposal in range(NUM_UNIFORMS)])
        for seed, each in enumerate(wanted)
    ]
    return DRAWS.draw(logits.to(DEVICE), draws)


@settings(max_examples=30)
@given(wanted=st.lists(params, min_size=1, max_size=4), seed=st.integers(0, 99))
def test_its_tokens_are_those_that_the_sampler_draws_one_by_one(
    wanted: list[SamplingParams], seed: int
) -> None:
    logits = rows(len(wanted), seed)
    sampler = Sampler(vocab_size=VOCABULARY, eos_ids=())
    one_by_one = [
        sampler.sample(logits[place : place + 1], [sampler.open(opened(place, each))]).tokens[0][0]
        for place, each in enumerate(wanted)
    ]

    found = drawn(logits, wanted)

    assert [mine for mine in found if mine != NONE_DRAWN] == [
        its for mine, its in zip(found, one_by_one, strict=True) if mine != NONE_DRAWN
    ]
    assert drawn(logits[:1], wanted[:1]) == found[:1]


def test_nearly_all_rows_need_few_random_numbers() -> None:
    wanted = [SamplingParams(temperature=1.0, top_p=0.9)] * 60

    assert drawn(rows(60, 1), wanted).count(NONE_DRAWN) <= 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [(math.nan, NOT_FINITE), (math.inf, NOT_FINITE)],
)
def test_a_row_that_is_no_distribution_has_no_token_and_harms_no_other(
    value: float, expected: int
) -> None:
    logits = rows(3, 2)
    wanted = [SamplingParams(temperature=1.0)] * 3
    whole = drawn(logits, wanted)
    logits[1, 2400] = value

    assert drawn(logits, wanted) == [whole[0], expected, whole[2]]


def test_a_row_without_a_token_that_is_allowed_says_so() -> None:
    logits = torch.full((1, VOCABULARY), -math.inf)

    assert drawn(logits, [SamplingParams(temperature=1.0)]) == [NONE_LEFT]


def opened(seed: int, wanted: SamplingParams) -> Open:
    """A sequence with this seed, before its first token."""
    return Open(seq=seed, ids=(1,), num_prompt=1, params=wanted, seed=seed, num_blocks=1)
