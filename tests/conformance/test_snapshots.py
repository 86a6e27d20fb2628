"""Sequences that begin with a snapshot of another one's recurrent state have the bits of a sequence
alone, in any number of stages and chunks, preempted or resumed, and in a new epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from services.stage.device.device import Device
from services.stage.engine.executor import Executor
from shardline.contract.job import SamplingParams
from shardline_scheduler.events import SequenceFinished
from shardline_scheduler.kv_blocks import BLOCK_TOKENS
from shardline_scheduler.sequence import Request
from tests.chain import Pressure, complete, load_chain, requests
from tests.models import save_model

HEAD = 5 * BLOCK_TOKENS
"""Tokens that all prompts begin with."""
BUDGET = 512
WARM = SamplingParams(max_tokens=9, temperature=0.8, logprobs=2)
KINDS = [
    ("lfm2", "bfloat16"),
    ("lfm2", "int8"),
    ("granitemoehybrid", "bfloat16"),
    ("qwen3-next", "float32"),
]
"""A short convolution; Mamba-2's state; the gated delta rule's, beside a mixture."""
KV_BYTES = 32 << 20

pytestmark = pytest.mark.parametrize(("name", "dtype"), KINDS)

Outcome = list[tuple[tuple[int, ...], object]]


@cache
def batch() -> list[Request]:
    """Prompts with 320 tokens in common and 1 to 141 of their own."""
    head = [3 + 7 * place % 90 for place in range(HEAD)]
    tails = ([4 + (place * own + own) % 80 for place in range(1 + 20 * own)] for own in range(8))
    return requests([head + tail for tail in tails], WARM)


LoadStages = Callable[[str, str, int], list[Executor]]


@pytest.fixture(scope="module")
def stages_of(model_folder: Path, device: Device) -> LoadStages:
    """Loads each kind once, when it is first asked for."""

    @cache
    def load(name: str, dtype: str, num: int) -> list[Executor]:
        path = save_model(model_folder / "snapshots", name, max_position_embeddings=1024)
        return load_chain(path, num, device, model_folder, dtype=dtype, kv_bytes=KV_BYTES)

    return load


@pytest.fixture
def one(stages_of: LoadStages, name: str, dtype: str) -> list[Executor]:
    """The model in one stage."""
    return stages_of(name, dtype, 1)


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, str], Outcome]:
    """What each kind gave alone, once asked."""
    return {}


@pytest.fixture
def expected(
    one: list[Executor], name: str, dtype: str, known: dict[tuple[str, str], Outcome]
) -> Outcome:
    """Each prompt alone, without a prefix cache."""
    if (name, dtype) not in known:
        known[name, dtype] = [outcome(alone(one, job))[0] for job in batch()]
    return known[name, dtype]


def alone(stages: Sequence[Executor], job: Request) -> list[SequenceFinished]:
    return complete(stages, [job], budget=BUDGET, seats=1, prefix_cache=False)


def outcome(ends: Sequence[SequenceFinished]) -> Outcome:
    """Ids and log-probabilities of each."""
    return [(end.output_ids, end.logprobs) for end in ends]


def num_cached(ends: Sequence[SequenceFinished]) -> list[int | None]:
    """Prompt tokens that were not computed."""
    return [end.num_cached for end in ends]


@pytest.mark.parametrize("way", [(1, BUDGET), (1, 37), (2, 200), (3, BUDGET)])
def test_prompts_taken_in_together_have_the_bits_of_each_alone(
    stages_of: LoadStages, name: str, dtype: str, expected: Outcome, way: tuple[int, int]
) -> None:
    num_stages, budget = way
    stages = stages_of(name, dtype, num_stages)

    found = complete(stages, batch(), budget=budget, seats=8)

    assert all(stage.exact for stage in stages)
    assert outcome(found) == expected
    assert num_cached(found) == [0, *[HEAD] * 7]
    assert [stage.states_used for stage in stages] == [0] * num_stages


@pytest.mark.parametrize("num_stages", [1, 2])
def test_prompts_in_turn_have_the_bits_of_each_alone(
    stages_of: LoadStages, name: str, dtype: str, expected: Outcome, num_stages: int
) -> None:
    found = complete(stages_of(name, dtype, num_stages), batch(), budget=BUDGET, seats=1)

    assert outcome(found) == expected
    assert num_cached(found)[2:] == [HEAD] * 6


def test_the_next_turn_begins_behind_the_answer(
    stages_of: LoadStages, one: list[Executor], name: str, dtype: str
) -> None:
    long = replace(WARM_LONG, key=("0", 1))
    (turn,) = complete(one, [long], budget=BUDGET, seats=1)
    follow = replace(long, key=("1", 1), prompt_ids=(*long.prompt_ids, *turn.output_ids, 5, 6))

    found = complete(stages_of(name, dtype, 2), [long, follow], budget=BUDGET, seats=1)

    assert num_cached(found) == [0, len(follow.prompt_ids) // BLOCK_TOKENS * BLOCK_TOKENS]
    assert outcome(found[1:]) == outcome(alone(one, follow))


def test_preempted_sequences_go_on_with_the_same_bits(one: list[Executor]) -> None:
    # Given KV for few of the sequences, which all grow by a block
    params = SamplingParams(max_tokens=2 * BLOCK_TOKENS, temperature=0.8, logprobs=2)
    jobs = [replace(job, prompt_ids=job.prompt_ids[:200], params=params) for job in batch()[:4]]
    jobs = [replace(job, prompt_ids=(*job.prompt_ids, 9 + at)) for at, job in enumerate(jobs)]
    expected = [outcome(alone(one, job))[0] for job in jobs]
    pressure = Pressure(num_blocks=11, num_slots=0)

    found = complete(one, jobs, budget=BUDGET, seats=4, pressure=pressure)

    assert len(pressure.opened) > len(jobs), "some were preempted"
    assert outcome(found) == expected


def test_resumed_jobs_go_on_with_the_same_tokens(one: list[Executor], expected: Outcome) -> None:
    jobs = [
        replace(job, output_ids=ids[:5]) for job, (ids, _) in zip(batch(), expected, strict=True)
    ]

    # When they come back in a new epoch, in which stages know nothing
    found = complete(one, jobs, budget=BUDGET, seats=3)

    assert [end.output_ids for end in found] == [ids for ids, _ in expected]
    assert max(each or 0 for each in num_cached(found)) == HEAD


WARM_LONG = Request(
    key=("long", 1),
    prompt_ids=tuple(3 + 11 * place % 83 for place in range(50)),
    params=SamplingParams(max_tokens=160, temperature=0.8, logprobs=2, ignore_eos=True),
    seed=4,
)
"""An answer of two blocks and more."""
