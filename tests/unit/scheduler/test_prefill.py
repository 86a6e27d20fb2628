"""The prefill rule, counted in steps: by rank, a share each, and who may overtake whom on the way
in."""

from __future__ import annotations

from itertools import count

import pytest

from shardline_scheduler.kv_blocks import BLOCK_TOKENS
from shardline_scheduler.sequence import MAX_OVERTAKEN
from tests.simulation.pipeline import (
    Pipeline,
    checked,
    config,
    decoding,
    expected_output,
    request,
    shape,
)

FULL_BLOCK = BLOCK_TOKENS - 1
"""A prompt whose second output token needs a second block."""


def steps_to_first_token(pipeline: Pipeline, name: str) -> int:
    """Each step is answered before the next is cut."""
    num_steps = 0
    while not pipeline.outputs[name, 1]:
        pipeline.schedule()
        pipeline.deliver()
        num_steps += 1
    return num_steps


@pytest.mark.parametrize(("long_priority", "short_priority"), [(9, 0), (5, 5), (0, 9)])
def test_a_short_prompt_has_its_first_token_in_three_steps_beside_a_long_prefill(
    long_priority: int, short_priority: int
) -> None:
    pipeline = Pipeline(config(num_blocks=2_000, token_budget=512, max_len=120_000))
    pipeline.add(request("long", num_prompt=100_000, priority=long_priority))
    for _ in range(3):
        pipeline.schedule()
        pipeline.deliver()

    pipeline.add(request("short", num_prompt=10, priority=short_priority))

    assert steps_to_first_token(pipeline, "short") <= 3


def test_an_urgent_prompt_has_its_first_token_in_three_steps_among_long_ones() -> None:
    pipeline = Pipeline(config(num_blocks=2_000, token_budget=512, max_len=20_000))
    for number in range(7):
        pipeline.add(request(f"long {number}", num_prompt=10_000))
    for _ in range(3):
        pipeline.schedule()
        pipeline.deliver()

    pipeline.add(request("urgent", num_prompt=10, priority=3))

    assert steps_to_first_token(pipeline, "urgent") <= 3


def test_a_prefill_takes_half_of_what_is_left_while_others_wait_else_all() -> None:
    pipeline = Pipeline(config(token_budget=400))
    pipeline.add(request("alone", num_prompt=500, max_tokens=1))
    assert shape(pipeline.schedule()) == [(0, 0, 400)]
    pipeline.deliver()
    for name, num_prompt in (("a", 350), ("b", 300), ("c", 30), ("d", 250)):
        pipeline.add(request(name, num_prompt=num_prompt, max_tokens=1))

    assert shape(pipeline.schedule()) == [
        (0, 400, 100),
        (1, 0, 150),
        (2, 0, 75),
        (3, 0, 30),
        (4, 0, 45),
    ]
    pipeline.deliver()
    assert shape(pipeline.schedule()) == [(1, 150, 200), (2, 75, 136), (4, 45, 64)]


def test_the_better_rank_goes_first_also_among_those_that_have_begun() -> None:
    pipeline = Pipeline(config(token_budget=100, num_blocks=100))
    pipeline.add(request("late", num_prompt=500, priority=9))
    pipeline.schedule()
    pipeline.deliver()

    pipeline.add(request("urgent", num_prompt=100, priority=0))

    assert shape(pipeline.schedule()) == [(1, 0, 64), (0, 100, 36)]


def test_a_request_without_room_is_overtaken_by_smaller_ones_but_not_for_ever() -> None:
    pipeline = Pipeline(config(num_blocks=6, max_seats=2, token_budget=512))
    name = next(
        name
        for name in map(str, count())
        if len(expected_output(request(name, num_prompt=65), 200)) == 200
    )
    decoding(pipeline, name, num_prompt=65, max_tokens=200)
    pipeline.add(request("large", num_prompt=5 * BLOCK_TOKENS, max_tokens=1))
    for number in range(2 * MAX_OVERTAKEN):
        pipeline.add(request(f"small {number}", max_tokens=1))

    pipeline.drain()

    order = [name for name, _ in pipeline.ends]
    before = order[: order.index("large")]
    assert before == [*(f"small {number}" for number in range(MAX_OVERTAKEN)), name]


def test_what_was_preempted_is_not_overtaken() -> None:
    pipeline = Pipeline(config(num_blocks=3))
    decoding(pipeline, "old", "young", num_prompt=FULL_BLOCK, max_tokens=60)
    while pipeline.scheduler.num_waiting == 0:
        pipeline.schedule()
        pipeline.deliver()

    pipeline.add(request("small"))

    assert [row.seq for row in checked(pipeline.schedule()).rows] == [0]
