"""Snapshots of recurrent states: a later prompt with the same first tokens begins with the last
one, and what sequences need of the slots goes first. The stages of the simulation check each
state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardline_scheduler.kv_blocks import BLOCK_TOKENS
from shardline_scheduler.sequence import Request
from shardline_scheduler.state_pool import StatePool
from tests.simulation.pipeline import Pipeline, checked, config, expected_output, request

HEAD = 8 * BLOCK_TOKENS
NAMES = "abcdefgh"


def pipeline_of(**changes: Any) -> Pipeline:
    return Pipeline(config(**{"num_states": 16, "max_len": 2048, "token_budget": 512, **changes}))


def job(name: str, **fields: Any) -> Request:
    """A prompt that begins with 512 common tokens and goes on with 100 of its own."""
    values = {"num_prompt": HEAD + 100, "num_common": HEAD, "max_tokens": 4, **fields}
    return request(name, **values)


def num_computed(pipeline: Pipeline, *jobs: Request) -> int:
    """Runs jobs to their end, all together; returns the rows of their prompts."""
    for each in jobs:
        pipeline.add(each)
    num_rows = 0
    while not pipeline.scheduler.idle:
        plan = pipeline.schedule()
        if plan is None:
            pipeline.deliver()
        else:
            num_rows += sum(row.length for row in plan.rows if not row.decodes)
    pipeline.drain()
    for each in jobs:
        expected = expected_output(each, each.params.max_tokens or 1)
        assert pipeline.outputs[each.key] == expected
    return num_rows


@pytest.mark.parametrize("num_lanes", [1, 3])
@pytest.mark.parametrize("token_budget", [100, 512, 4096])
def test_prompts_taken_in_together_compute_a_common_head_once(
    num_lanes: int, token_budget: int
) -> None:
    settings = {"num_lanes": num_lanes, "token_budget": token_budget}
    jobs = [job(name) for name in NAMES]

    shared = num_computed(pipeline_of(**settings), *jobs)
    alone = num_computed(pipeline_of(**settings, prefix_cache=False), *jobs)

    assert alone == 8 * (HEAD + 100)
    assert shared == HEAD + 8 * 100


def test_prompts_in_turn_begin_where_two_of_them_have_parted() -> None:
    # Given a first prompt, which stops at its last full block alone
    pipeline = pipeline_of()

    found = [num_computed(pipeline, job(name)) for name in NAMES]

    # Then the second computes all, stops where they part, and the others begin there
    assert found == [HEAD + 100] * 2 + [100] * 6


def test_the_same_prompt_again_computes_less_than_a_block() -> None:
    pipeline = pipeline_of()
    num_computed(pipeline, job("a"))

    assert num_computed(pipeline, replace(job("a"), key=("again", 1))) == 100 - BLOCK_TOKENS


def test_the_next_turn_of_a_chat_begins_behind_the_last_full_block_of_the_answer() -> None:
    pipeline = pipeline_of()
    asked = request("b", num_prompt=40, max_tokens=300)
    num_computed(pipeline, asked)
    answer = pipeline.outputs[asked.key]
    full = (40 + len(answer) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert full, "the answer fills a block"
    known = (*asked.prompt_ids, *answer, 7, 8)

    turn = Request(key=("next", 1), prompt_ids=known, params=asked.params, seed=3)
    pipeline.add(turn)
    (opened,) = checked(pipeline.schedule()).opens

    assert opened.num_cached == full
    pipeline.drain()
    assert pipeline.outputs[turn.key] == expected_output(turn, 300)


def test_a_short_prompt_is_computed_in_one_step() -> None:
    pipeline = pipeline_of()
    pipeline.add(request("a", num_prompt=3 * BLOCK_TOKENS + 5, max_tokens=1))

    assert [row.length for row in checked(pipeline.schedule()).rows] == [3 * BLOCK_TOKENS + 5]
    pipeline.drain()
    assert pipeline.stages.num_snapshots == 0


def test_two_slots_serve_a_sequence_and_the_next() -> None:
    # Given that each snapshot is in the only slot that another sequence can have
    pipeline = pipeline_of(num_states=2)

    shared = num_computed(pipeline, *(job(name) for name in "ab"))

    assert shared == HEAD + 2 * 100


def test_one_slot_holds_no_snapshot_and_delays_no_one() -> None:
    pipeline = pipeline_of(num_states=1)

    assert num_computed(pipeline, *(job(name) for name in NAMES)) == 8 * (HEAD + 100)


def test_jobs_that_need_all_slots_take_those_of_snapshots() -> None:
    pipeline = pipeline_of(num_states=8)
    num_computed(pipeline, job("a"), job("b"))
    assert pipeline.scheduler.num_snapshots > 0

    for name in NAMES:
        pipeline.add(request(name + name, max_tokens=50))
    plan = checked(pipeline.schedule())

    assert len(plan.opens) == 8
    assert pipeline.scheduler.num_snapshots == 0
    pipeline.drain()


def test_who_finds_more_than_the_common_head_waits_for_nobody() -> None:
    # Given one that has run, and another that computes their common head again
    pipeline = pipeline_of()
    num_computed(pipeline, job("z"))

    for each in (job("a"), replace(job("z"), key=("again", 1))):
        pipeline.add(each)

    opens = checked(pipeline.schedule()).opens
    assert [one.num_cached for one in opens] == [0, HEAD + BLOCK_TOKENS]
    pipeline.drain()


def test_another_tenants_prompt_finds_no_snapshot() -> None:
    pipeline = pipeline_of()
    num_computed(pipeline, job("a"), job("b"))

    assert num_computed(pipeline, job("c", tenant="another")) == HEAD + 100


def test_a_job_with_bad_logits_leaves_no_snapshot() -> None:
    pipeline = pipeline_of()
    pipeline.add(job("a"))
    while not pipeline.ends:
        pipeline.schedule(bad=(0,))
        pipeline.deliver()
    pipeline.drain()

    assert pipeline.stages.num_snapshots > 0
    assert pipeline.scheduler.num_snapshots == 0
    assert num_computed(pipeline, job("b")) == HEAD + 100


def test_a_new_epoch_begins_without_snapshots() -> None:
    pipeline = pipeline_of()
    jobs = [job(name, max_tokens=200) for name in "abc"]
    for each in jobs[:2]:
        pipeline.add(each)
    for _ in range(6):
        pipeline.turn()
    pipeline.rebuild(num_blocks=100)
    assert pipeline.scheduler.num_snapshots == 0

    num_computed(pipeline, *jobs[2:])

    assert [pipeline.outputs[each.key] for each in jobs] == [
        expected_output(each, 200) for each in jobs
    ]


def test_a_preempted_sequence_goes_on_behind_its_last_snapshot() -> None:
    # Given two sequences and blocks that end before they do
    pipeline = pipeline_of(num_blocks=13)
    jobs = [request(name, num_prompt=300, max_tokens=400) for name in "ez"]
    for each in jobs:
        pipeline.add(each)

    cached: list[int] = []
    while not pipeline.scheduler.idle:
        plan = pipeline.schedule()
        if plan is None:
            pipeline.deliver()
        else:
            cached += [opened.num_cached for opened in plan.opens]
    pipeline.drain()

    assert [pipeline.outputs[each.key] for each in jobs] == [
        expected_output(each, 400) for each in jobs
    ]
    assert len(cached) > 2, "one was preempted"
    assert max(cached) > 0


def test_the_snapshot_that_was_not_used_for_longest_goes_first() -> None:
    pool = StatePool(3)
    slots = [pool.keep(name, None) for name in (b"a", b"b", b"c")]
    assert sorted(slot for slot in slots if slot is not None) == [0, 1, 2]

    assert pool.keep(b"a", None) is None, "it is there"
    assert pool.open(7, b"b") == (slots[2], slots[1])
    assert pool.keep(b"d", None) == slots[0]
    assert [pool.holds(name) for name in (b"a", b"b", b"c", b"d")] == [False, True, False, True]


def test_the_last_snapshot_becomes_the_state_of_who_begins_with_it() -> None:
    pool = StatePool(2)
    pool.open(1, None)
    slot = pool.keep(b"a", None)

    assert pool.open(2, b"a") == (slot, slot)
    assert pool.keep(b"b", None) is None, "sequences have all slots"
    pool.close([1])
    assert pool.keep(b"b", None) is not None
