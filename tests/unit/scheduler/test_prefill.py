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

    pipeline.add(request("urgent", num_prompt=10, priority=4))

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

    pipeline.add(request("urgent", num_prompt=100, priority=4))

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


def alone(num_prompt: int, *, fixed_tokens: float, **changes: int) -> Pipeline:
    """One prompt in a pipeline that knows what its steps cost."""
    pipeline = Pipeline(config(**{"num_lanes": 2, "max_len": 2_000, **changes}))
    for num_tokens in (1, 100):
        pipeline.scheduler.step_cost.learn(num_tokens, 0.001 * (num_tokens + fixed_tokens))
    pipeline.add(request("alone", num_prompt=num_prompt, max_tokens=1))
    return pipeline


def lengths_of_steps(pipeline: Pipeline) -> list[int]:
    """As many steps in flight as there may be."""
    lengths = []
    while not pipeline.scheduler.idle:
        while (plan := pipeline.schedule()) is not None:
            lengths.append(plan.num_tokens)
        pipeline.deliver()
    return [length for length in lengths if length]


@pytest.mark.parametrize(
    ("num_prompt", "num_lanes", "fixed_tokens", "lengths"),
    [
        (128, 2, 8, [32, 32, 32, 32]),
        (128, 2, 14, [43, 43, 42]),
        (512, 2, 7.9, [64] * 8),
        (512, 4, 8, [40] * 12 + [32]),
        (128, 2, 0, [32, 32, 32, 32]),
        (1_850, 2, 8, [124] * 14 + [114]),
        (60, 2, 8, [60]),
        (128, 2, 200, [128]),
        (128, 1, 8, [128]),
    ],
)
def test_a_prompt_alone_is_cut_by_what_a_step_costs_and_by_lanes(
    num_prompt: int, num_lanes: int, fixed_tokens: float, lengths: list[int]
) -> None:
    pipeline = alone(num_prompt, fixed_tokens=fixed_tokens, num_lanes=num_lanes)

    assert lengths_of_steps(pipeline) == lengths


def test_a_prompt_alone_is_not_cut_before_the_cost_of_a_step_is_known() -> None:
    pipeline = Pipeline(config(num_lanes=2))
    pipeline.add(request("alone", num_prompt=128, max_tokens=1))

    assert shape(pipeline.schedule()) == [(0, 0, 128)]


def test_a_prompt_is_not_cut_while_others_fill_a_step() -> None:
    pipeline = alone(128, fixed_tokens=8)
    for name in ("b", "c"):
        pipeline.add(request(name, num_prompt=128, max_tokens=1))

    assert shape(pipeline.schedule()) == [(0, 0, 128), (1, 0, 64), (2, 0, 64)]


def test_short_prompts_are_not_cut_to_one_in_each_step() -> None:
    pipeline = alone(12, fixed_tokens=50, max_seats=32)
    for number in range(99):
        pipeline.add(request(str(number), num_prompt=12, max_tokens=1))
    assert checked(pipeline.schedule()).num_tokens == pipeline.scheduler.config.token_budget

    pipeline = alone(40, fixed_tokens=8)
    for number in range(4):
        pipeline.add(request(str(number), num_prompt=40, max_tokens=1))
    assert lengths_of_steps(pipeline) == [40] * 5, "of a line of 200 tokens five pieces"


def test_lanes_for_links_cut_no_prompt_further() -> None:
    pipeline = alone(128, fixed_tokens=14, num_lanes=8, num_stages=2)

    assert lengths_of_steps(pipeline) == [43, 43, 42]


def test_a_prompt_is_cut_beside_one_decode_but_not_beside_one_for_each_lane() -> None:
    for num_decodes, pieces in ((1, [(1, 0, 32)]), (2, [(2, 0, 128)])):
        pipeline = Pipeline(config(num_lanes=2))
        decoding(pipeline, *map(str, range(num_decodes)), max_tokens=60)
        for num_tokens in (1, 100):
            pipeline.scheduler.step_cost.learn(num_tokens, 0.001 * (num_tokens + 8))
        pipeline.add(request("late", num_prompt=128))

        rows = shape(pipeline.schedule())

        assert [row for row in rows if row[2] > 1] == pieces
