"""Full blocks of preempted sequences go to slots when their memory is needed, and come back instead
of a prefill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline_scheduler.kv_blocks import BLOCK_TOKENS
from shardline_scheduler.offload import Offload, OffloadTerms
from shardline_scheduler.prefix_cache import PrefixCache
from shardline_scheduler.sequence import Request, Sequence
from shardline_scheduler.step_cost import StepCost
from shardline_scheduler.step_plan import StepPlan
from tests.simulation.pipeline import Numbers, Pipeline, config, expected_output, request

NUM_PROMPT = 2 * BLOCK_TOKENS + 10
MAX_TOKENS = 200


def job(name: str, **fields: Any) -> Request:
    """A prompt of two blocks and a bit, and an answer of three more."""
    return request(name, **{"num_prompt": NUM_PROMPT, "max_tokens": MAX_TOKENS, **fields})


def pipeline_of(
    *jobs: Request, num_slots: int = 8, move_s: float = 0.0, **changes: Any
) -> Pipeline:
    """Six blocks: two of the jobs begin there, and one of them ends there alone."""
    offload = OffloadTerms(num_slots=num_slots, move_s=move_s)
    pipeline = Pipeline(config(**{"num_blocks": 6, "offload": offload, "max_seats": 2, **changes}))
    for each in jobs:
        pipeline.add(each)
    return pipeline


def long_jobs(number: int, **fields: Any) -> list[Request]:
    """Jobs that need all their tokens."""
    jobs = (job(name, **fields) for name in map(str, range(200)))
    return [each for each in jobs if len(expected_output(each, MAX_TOKENS)) == MAX_TOKENS][:number]


def run_until(pipeline: Pipeline, is_so: Callable[[], bool]) -> list[StepPlan]:
    """The plans until then."""
    plans = []
    while not is_so():
        plan = pipeline.schedule()
        if plan is None:
            pipeline.deliver()
        else:
            plans.append(plan)
    return plans


def end(pipeline: Pipeline, *jobs: Request) -> None:
    """Runs to the end; outputs are those of undisturbed runs."""
    pipeline.drain()
    for each in jobs:
        assert pipeline.outputs[each.key] == expected_output(each, MAX_TOKENS)


def num_moved(pipeline: Pipeline) -> tuple[int, int]:
    """Out and back."""
    return pipeline.stages.num_moved[True], pipeline.stages.num_moved[False]


def test_a_preempted_job_comes_back_with_its_blocks_and_computes_no_more_than_one() -> None:
    first, second = long_jobs(2)
    pipeline = pipeline_of(first, second)
    run_until(pipeline, lambda: pipeline.scheduler.slots_used > 0)

    plans = run_until(
        pipeline, lambda: first.key in pipeline.ends and pipeline.scheduler.num_running == 1
    )

    (again,) = plans[-1].opens
    (row,) = plans[-1].rows
    assert (
        again.num_cached == (len(again.ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS >= 2 * BLOCK_TOKENS
    )
    assert row.length == len(again.ids) - again.num_cached
    assert plans[-1].moves
    assert pipeline.scheduler.slots_used == 0
    end(pipeline, first, second)


def test_a_block_is_copied_when_its_memory_is_needed_and_not_before() -> None:
    jobs = long_jobs(2)
    pipeline = pipeline_of(*jobs)
    plans = run_until(pipeline, lambda: pipeline.scheduler.slots_used > 0)
    assert not any(plan.moves for plan in plans), "the block that was not full is taken first"

    plans = run_until(pipeline, lambda: num_moved(pipeline) != (0, 0))

    (move,) = plans[-1].moves
    assert move.is_out
    assert (move.block,) == plans[-1].rows[0].blocks, "its new owner has it in the same step"
    assert pipeline.scheduler.slots_used > 1


def test_without_slots_nothing_is_moved() -> None:
    jobs = long_jobs(2)
    pipeline = pipeline_of(*jobs, num_slots=0)

    end(pipeline, *jobs)

    assert num_moved(pipeline) == (0, 0)


def test_few_slots_keep_the_first_blocks_which_alone_are_found_again() -> None:
    jobs = long_jobs(2)
    pipeline = pipeline_of(*jobs, num_slots=1)

    end(pipeline, *jobs)

    num_out, num_back = num_moved(pipeline)
    assert num_back == num_out > 0


def test_a_job_that_is_cancelled_while_it_waits_leaves_its_slots() -> None:
    first, second = long_jobs(2)
    pipeline = pipeline_of(first, second)
    run_until(pipeline, lambda: num_moved(pipeline)[0] > 0)

    pipeline.abort(second.key)

    assert pipeline.scheduler.slots_used == 0
    end(pipeline, first)


def test_a_new_epoch_trusts_no_slot() -> None:
    jobs = long_jobs(2)
    pipeline = pipeline_of(*jobs)
    run_until(pipeline, lambda: num_moved(pipeline)[0] > 0)

    pipeline.rebuild(num_blocks=16)

    assert pipeline.scheduler.slots_used == 0
    end(pipeline, *jobs)
    assert num_moved(pipeline) == (0, 0)


def test_an_epoch_with_other_stages_has_their_slots() -> None:
    jobs = long_jobs(2)
    pipeline = pipeline_of(*jobs, num_slots=0)

    pipeline.rebuild(6, offload=OffloadTerms(num_slots=8))

    end(pipeline, *jobs)
    assert num_moved(pipeline)[1] > 0


def test_jobs_that_wait_for_the_same_tokens_have_one_slot_until_both_are_back() -> None:
    offload = Offload(num_slots=3)
    first, second = (Sequence(job(name), Numbers(1), arrival=0, max_len=512) for name in "ab")
    offload.keep(first, [b"common", b"first"])
    offload.keep(second, [b"common", b"second", b"for which there is no slot"])
    assert offload.num_used == 3
    for block, name in enumerate([b"common", b"second", b"for which there is no slot"]):
        offload.evict(block, name)
    assert len(offload.take_moves()) == 2

    offload.drop(first)

    assert offload.num_used == 2
    assert offload.holds(b"common")
    offload.evict(4, b"common")
    assert offload.take_moves() == (), "what a slot holds is not copied again"
    offload.drop(second)
    assert offload.num_used == 0


def test_a_block_is_copied_out_before_another_is_copied_into_its_place() -> None:
    cache = PrefixCache(3, is_on=True, num_slots=4)
    contents = dict[tuple[str, int], tuple[int, ...]]()
    first, second = (Sequence(job(name), Numbers(1), arrival=0, max_len=512) for name in "ab")

    for turn, sequence in enumerate([first, second] * 3):
        cache.open(sequence)
        for move in cache.offload.take_moves():
            block = ("block", move.block)
            slot = ("slot", move.slot)
            source, target = (block, slot) if move.is_out else (slot, block)
            contents[target] = contents[source]
        chunks = [tuple(sequence.ids[at : at + BLOCK_TOKENS]) for at in (0, BLOCK_TOKENS)]
        restored = [
            contents["block", block]
            for block in sequence.blocks[: sequence.num_computed // BLOCK_TOKENS]
        ]
        assert restored == (chunks if turn > 1 else [])
        contents |= {
            ("block", block): chunk for block, chunk in zip(sequence.blocks, chunks, strict=False)
        }
        sequence.num_computed = len(sequence.ids)
        cache.keep([sequence])
        cache.preempt(sequence)
        cache.pool.free(sequence.blocks)
        sequence.forget_kv()


def test_kv_that_is_computed_sooner_than_copied_is_not_kept() -> None:
    jobs = long_jobs(2)
    pipeline = pipeline_of(*jobs, move_s=1.0)
    for num_tokens in (1, 64, 8, 32):
        pipeline.scheduler.step_cost.learn(num_tokens, 0.1 + num_tokens * 0.9 / BLOCK_TOKENS)

    end(pipeline, *jobs)

    assert num_moved(pipeline) == (0, 0)


def test_kv_of_a_job_whose_logits_were_not_finite_is_not_restored() -> None:
    first, second, third = long_jobs(3, num_common=BLOCK_TOKENS)
    pipeline = pipeline_of(first, second, third, max_seats=3, num_blocks=7)
    run_until(pipeline, lambda: num_moved(pipeline)[0] > 0)
    while pipeline.flights:
        pipeline.deliver()

    pipeline.schedule(bad=(0,))
    pipeline.deliver()

    assert first.key in pipeline.ends
    pipeline.drain()
    for each in (second, third):
        assert pipeline.outputs[each.key] == expected_output(each, MAX_TOKENS)


@settings(max_examples=40)
@given(
    num_slots=st.integers(1, 9),
    num_blocks=st.integers(6, 9),
    num_lanes=st.integers(1, 3),
    num_common=st.sampled_from([0, 64, 128]),
    prompt_lookup=st.sampled_from([0, 16]),
)
def test_pressure_of_any_kind_gives_the_tokens_of_jobs_alone(**changes: int) -> None:
    num_common = changes.pop("num_common")
    jobs = [
        replace(job(str(number), num_common=num_common, repeats=number % 2 == 0))
        for number in range(6)
    ]
    pipeline = pipeline_of(*jobs, **{"max_seats": 6, **changes})

    end(pipeline, *jobs)


def test_the_cost_of_a_token_is_the_slope_of_steps_not_their_mean() -> None:
    cost = StepCost()
    assert cost.is_above(1e9), "nothing is known"
    for num_tokens in (1, 512, 40, 300) * 20:
        cost.learn(num_tokens, 0.5 + 0.002 * num_tokens)

    assert cost.token_s == pytest.approx(0.002)
    assert cost.is_above(0.127)
    assert not cost.is_above(0.129)
    assert cost.fixed_tokens == pytest.approx(250)


def test_steps_of_one_size_tell_nothing_of_a_token() -> None:
    cost = StepCost()
    for _ in range(100):
        cost.learn(16, 0.5)

    assert cost.token_s is None
    assert cost.fixed_tokens is None


def test_what_a_token_costs_is_known_after_a_long_answer() -> None:
    cost = StepCost()
    for num_tokens in (128, *(1,) * 10_000):
        cost.learn(num_tokens, 0.008 + 0.001 * num_tokens)

    assert cost.fixed_tokens == pytest.approx(8)


def test_a_device_that_grew_faster_is_learned() -> None:
    cost = StepCost()
    for token_s in (0.01, 0.001):
        for num_tokens in (1, 100) * 500:
            cost.learn(num_tokens, num_tokens * token_s)

    assert cost.token_s == pytest.approx(0.001, rel=0.01)
