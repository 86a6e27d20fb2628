"""Sequences with one beginning that are taken in together compute it once: the others wait for the
one that comes first."""

from __future__ import annotations

from typing import Any

import pytest

from shardline_scheduler.kv_blocks import BLOCK_TOKENS
from shardline_scheduler.sequence import MAX_OVERTAKEN, Request
from tests.simulation.pipeline import Pipeline, checked, config, expected_output, request

NUM_PROMPT = 512
NAMES = "abcdefgh"


def choice(name: str, **fields: Any) -> Request:
    """One of those that share a prompt, of which no token is their own."""
    return request(
        name, **{"num_prompt": NUM_PROMPT, "num_common": NUM_PROMPT, "max_tokens": 4, **fields}
    )


def num_computed(pipeline: Pipeline, jobs: list[Request]) -> int:
    """Takes them in together and runs them to their end; returns the rows of their prompts."""
    for job in jobs:
        pipeline.add(job)
    num_tokens = 0
    while not pipeline.scheduler.idle:
        plan = pipeline.schedule()
        if plan is None:
            pipeline.deliver()
        else:
            num_tokens += sum(row.length for row in plan.rows if not row.decodes)
    check_outputs(pipeline, jobs)
    return num_tokens


def check_outputs(pipeline: Pipeline, jobs: list[Request]) -> None:
    """All of them ended as they would have alone."""
    pipeline.drain()
    for job in jobs:
        assert pipeline.outputs[job.key] == expected_output(job, job.params.max_tokens or 1)


def opened(pipeline: Pipeline) -> list[int]:
    """The first tokens with KV of those that the next step opens."""
    return [record.num_cached for record in checked(pipeline.schedule()).opens]


@pytest.mark.parametrize("num_lanes", [1, 3])
@pytest.mark.parametrize("token_budget", [100, 256, 4096])
def test_choices_of_a_prompt_compute_it_once(num_lanes: int, token_budget: int) -> None:
    settings = {"num_lanes": num_lanes, "token_budget": token_budget, "max_len": 1024}
    jobs = [choice(name) for name in NAMES]

    shared = num_computed(Pipeline(config(**settings)), jobs)
    alone = num_computed(Pipeline(config(**settings, prefix_cache=False)), jobs)

    assert alone == len(NAMES) * NUM_PROMPT
    assert shared == NUM_PROMPT + (len(NAMES) - 1) * BLOCK_TOKENS, "the last block is their own"


def test_who_shares_a_beginning_waits_for_no_more_than_that() -> None:
    pipeline = Pipeline(config(token_budget=64, max_len=1024))
    jobs = [choice("a"), choice("b", num_common=BLOCK_TOKENS)]
    for job in jobs:
        pipeline.add(job)

    assert opened(pipeline) == [0]
    pipeline.deliver()
    pipeline.abort(jobs[0].key)
    pipeline.add(choice("c"))
    assert opened(pipeline) == [BLOCK_TOKENS], "of b, with the block that a has computed"

    pipeline.drain()
    check_outputs(pipeline, jobs[1:])


def test_when_the_first_is_canceled_the_next_goes_on_from_its_blocks() -> None:
    pipeline = Pipeline(config(token_budget=128, max_len=1024))
    jobs = [choice(name) for name in "abc"]
    for job in jobs:
        pipeline.add(job)
    assert opened(pipeline) == [0]

    pipeline.abort(jobs[0].key)

    pipeline.deliver()
    assert opened(pipeline) == [128], "of b, for which c waits now"
    pipeline.deliver()
    check_outputs(pipeline, jobs[1:])


def test_when_the_first_is_preempted_all_of_them_still_end() -> None:
    pipeline = Pipeline(config(num_blocks=10, token_budget=130, max_len=1024))
    decoding = request("d", num_prompt=128, max_tokens=100, priority=0)
    jobs = [decoding, *(choice(name, priority=1) for name in "ab")]
    for job in jobs:
        pipeline.add(job)

    num_opened = 0
    while not pipeline.scheduler.idle:
        plan = pipeline.schedule()
        num_opened += len(plan.opens) if plan else 0
        if pipeline.flights:
            pipeline.deliver()

    assert num_opened > len(jobs), "a was preempted"
    check_outputs(pipeline, jobs)


def test_a_sequence_waits_for_none_that_is_behind_it() -> None:
    pipeline = Pipeline(config(token_budget=64, max_len=1024))
    jobs = [choice("late", priority=9), choice("urgent", priority=0)]
    pipeline.add(jobs[0])
    assert opened(pipeline) == [0]
    pipeline.deliver()

    pipeline.add(jobs[1])

    assert opened(pipeline) == [BLOCK_TOKENS]
    pipeline.deliver()
    check_outputs(pipeline, jobs)


@pytest.mark.parametrize(
    ("settings", "fields"),
    [({"prefix_cache": False}, {}), ({}, {"tenant": "another"}), ({}, {"num_common": 63})],
)
def test_who_would_find_nothing_does_not_wait(
    settings: dict[str, Any], fields: dict[str, Any]
) -> None:
    pipeline = Pipeline(config(token_budget=256, max_len=1024, **settings))
    jobs = [choice("a"), choice("b", **fields)]
    for job in jobs:
        pipeline.add(job)

    assert opened(pipeline) == [0, 0]
    pipeline.deliver()
    check_outputs(pipeline, jobs)


def test_others_pass_those_that_wait_but_not_for_ever() -> None:
    pipeline = Pipeline(config(token_budget=65, max_len=1024, max_seats=100))
    jobs = [choice("a"), choice("b"), *(request(f"{n}", max_tokens=1) for n in range(50))]
    for job in jobs:
        pipeline.add(job)
    order: list[int] = []
    while not pipeline.scheduler.idle:
        plan = pipeline.schedule()
        order += [len(record.ids) for record in plan.opens] if plan else []
        pipeline.deliver()

    assert order.index(NUM_PROMPT) == 0
    assert 1 < order.index(NUM_PROMPT, 1) <= 1 + MAX_OVERTAKEN
    check_outputs(pipeline, jobs)


def test_a_new_epoch_begins_with_the_first_of_them() -> None:
    pipeline = Pipeline(config(token_budget=64, max_len=1024))
    jobs = [choice(name) for name in "abc"]
    for job in jobs:
        pipeline.add(job)
    for _ in range(3):
        pipeline.schedule()
        pipeline.deliver()

    pipeline.rebuild(100)

    check_outputs(pipeline, jobs)
