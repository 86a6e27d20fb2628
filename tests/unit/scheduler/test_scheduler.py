"""What the scheduler decides, case by case. The simulation shows that outputs never change; this
shows the choices."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from shardline.base.errors import ProtocolError
from shardline.contract.job import FinishReason, SamplingParams, TokenLogprob
from shardline_scheduler.events import NewTokens, SequenceFailed, SequenceFinished
from shardline_scheduler.kv_blocks import BLOCK_TOKENS
from shardline_scheduler.step_plan import StepResult, decode_plan, encode
from tests.simulation.pipeline import (
    Numbers,
    Pipeline,
    config,
    decoding,
    expected_output,
    request,
    shape,
)
from tests.simulation.stages import NUM_TOKENS

FULL_BLOCK = BLOCK_TOKENS - 1
"""A prompt whose second output token needs a second block."""


@pytest.mark.parametrize(
    ("params", "seed"),
    [
        (SamplingParams(max_tokens=2, top_k=2**64), 1),
        (SamplingParams(max_tokens=2**31), 1),
        (SamplingParams(max_tokens=2, temperature=math.nan), 1),
        (SamplingParams(max_tokens=2), -1),
    ],
)
def test_a_request_that_no_stage_would_read_fails_alone(params: SamplingParams, seed: int) -> None:
    # Given a head with a job, and a row that somebody has written by hand
    pipeline = Pipeline(config())
    decoding(pipeline, "a")

    # When the head takes it
    events = pipeline.scheduler.add(replace(request("b"), params=params, seed=seed), Numbers(2))

    # Then it ends with its reason, and the next plan is one that every stage reads
    (end,) = events
    assert isinstance(end, SequenceFailed)
    assert "stages do not take its parameters" in end.reason
    plan = pipeline.schedule()
    assert plan is not None
    assert decode_plan(encode(plan)) == plan


def test_decode_rows_come_first_and_prefill_takes_the_rest_of_the_budget() -> None:
    pipeline = Pipeline(config(token_budget=10))
    decoding(pipeline, "a", "b")

    pipeline.add(request("c", num_prompt=20))

    assert shape(pipeline.schedule()) == [(0, 5, 1), (1, 5, 1), (2, 0, 8)]


def test_only_the_last_chunk_wants_a_token_and_only_decodes_bring_ids() -> None:
    pipeline = Pipeline(config(token_budget=8, num_lanes=3))
    pipeline.add(request(num_prompt=20))

    plans = [pipeline.schedule() for _ in range(3)]
    for _ in plans:
        pipeline.deliver()
    decode = pipeline.schedule()

    assert [(row.wants, row.ids) for plan in plans if plan for row in plan.rows] == [
        (False, ()),
        (False, ()),
        (True, ()),
    ]
    assert decode is not None
    assert decode.rows[0].ids == (pipeline.outputs["a", 1][0],)


def test_the_next_chunk_does_not_wait_but_the_next_decode_does() -> None:
    pipeline = Pipeline(config(token_budget=8, num_lanes=3))
    pipeline.add(request(num_prompt=10))

    assert shape(pipeline.schedule()) == [(0, 0, 8)]
    assert shape(pipeline.schedule()) == [(0, 8, 2)]
    assert pipeline.schedule() is None


def test_no_more_steps_are_in_flight_than_lanes() -> None:
    pipeline = Pipeline(config(token_budget=4, num_lanes=2))
    pipeline.add(request(num_prompt=100))

    assert [pipeline.schedule() is None for _ in range(3)] == [False, False, True]
    assert pipeline.scheduler.num_in_flight == 2


@pytest.mark.parametrize(("num_lanes", "num_rows"), [(1, [5]), (2, [3, 2]), (3, [2, 2, 1])])
def test_decodes_are_shared_out_so_that_every_lane_is_filled(
    num_lanes: int, num_rows: list[int]
) -> None:
    pipeline = Pipeline(config(num_lanes=num_lanes))
    decoding(pipeline, *"abcde")

    assert [len(shape(pipeline.schedule())) for _ in range(num_lanes)] == num_rows


def test_decodes_are_shared_out_over_the_lanes_that_links_ask_for_in_an_epoch() -> None:
    pipeline = Pipeline(config(num_lanes=1))
    decoding(pipeline, *"abcde")

    pipeline.scheduler.config = replace(pipeline.scheduler.config, num_lanes=3)

    assert [len(shape(pipeline.schedule())) for _ in range(3)] == [2, 2, 1]


def test_an_open_carries_all_that_a_restarted_tail_needs() -> None:
    pipeline = Pipeline(config())
    job = request(num_prompt=70, max_tokens=100, output_ids=(7, 8))
    pipeline.add(job)

    plan = pipeline.schedule()

    assert plan is not None
    record = plan.opens[0]
    assert (record.ids, record.num_prompt, record.seed) == ((*job.prompt_ids, 7, 8), 70, job.seed)
    assert (record.params, record.num_blocks) == (job.params, 3)


def test_waiting_requests_start_by_priority_then_arrival() -> None:
    pipeline = Pipeline(config(max_seats=1))
    for name, priority in [("low", 9), ("first", 5), ("second", 5), ("urgent", 0)]:
        pipeline.add(request(name, max_tokens=1, priority=priority))

    pipeline.drain()

    assert [name for name, _ in pipeline.ends] == ["urgent", "first", "second", "low"]


def test_a_finished_sequence_is_closed_by_a_plan_of_its_own_when_nothing_else_runs() -> None:
    pipeline = Pipeline(config())
    pipeline.add(request(max_tokens=1))
    pipeline.schedule()
    pipeline.deliver()

    plan = pipeline.schedule()

    assert plan is not None
    assert (plan.opens, plan.rows, plan.closes) == ((), (), (0,))
    assert not pipeline.scheduler.idle
    pipeline.deliver()
    assert pipeline.scheduler.idle


def test_events_tell_tokens_then_the_end() -> None:
    pipeline = Pipeline(config())
    job = request(max_tokens=1, logprobs=0)
    token = expected_output(job, 1)[0]
    pipeline.add(job)
    pipeline.schedule()

    events = pipeline.deliver()

    logprobs = (TokenLogprob(token, -1.0),)
    assert events == [
        NewTokens(key=job.key, start=0, ids=(token,), text=f"{token} ", logprobs=logprobs),
        SequenceFinished(
            key=job.key,
            reason=FinishReason.LENGTH,
            output_ids=(token,),
            text=f"{token} ",
            logprobs=logprobs,
        ),
    ]


def test_a_resumed_request_goes_on_at_its_next_token() -> None:
    pipeline = Pipeline(config())
    whole = expected_output(request(max_tokens=20), 20)
    pipeline.add(request(max_tokens=20, output_ids=tuple(whole[:7])))
    pipeline.schedule()

    (event,) = pipeline.deliver()

    assert isinstance(event, NewTokens)
    assert (event.start, event.ids) == (7, (whole[7],))


def test_a_resumed_request_whose_checkpoint_is_complete_ends_at_once() -> None:
    pipeline = Pipeline(config())

    pipeline.add(request(max_tokens=3, output_ids=(7, 8, 9)))

    end = pipeline.ends["a", 1]
    assert isinstance(end, SequenceFinished)
    assert (end.reason, end.output_ids, end.text) == (FinishReason.LENGTH, (7, 8, 9), "7 8 9 ")
    assert pipeline.scheduler.idle


def test_full_pools_preempt_the_youngest_of_the_lowest_priority() -> None:
    pipeline = Pipeline(config(num_blocks=3))
    for name, priority in [("kept", 5), ("low", 6), ("young", 5)]:
        pipeline.add(request(name, num_prompt=FULL_BLOCK, max_tokens=60, priority=priority))
    pipeline.schedule()
    pipeline.deliver()
    pipeline.schedule()
    pipeline.deliver()

    plan = pipeline.schedule()

    assert plan is not None
    assert [row.seq for row in plan.rows] == [0]
    assert plan.closes == (2, 1)
    pipeline.drain()
    assert pipeline.outputs["low", 1] == expected_output(request("low", num_prompt=FULL_BLOCK), 60)


def test_a_preempted_sequence_keeps_the_token_that_was_in_flight() -> None:
    pipeline = Pipeline(config(num_blocks=2, num_lanes=2))
    decoding(pipeline, "old", "young", num_prompt=FULL_BLOCK, max_tokens=60)
    pipeline.schedule()
    pipeline.schedule()
    pipeline.deliver()
    assert pipeline.schedule() is None, (
        "old needs a block: young has to go, but its step is still in flight"
    )
    assert pipeline.scheduler.num_running == 1

    pipeline.deliver()

    assert len(pipeline.outputs["young", 1]) == 2
    assert shape(pipeline.schedule()) == [(0, BLOCK_TOKENS, 1)]


def test_an_aborted_sequence_keeps_its_blocks_until_no_step_in_flight_uses_them() -> None:
    pipeline = Pipeline(config(token_budget=16, num_lanes=2))
    pipeline.add(request(num_prompt=100))
    pipeline.schedule()
    pipeline.schedule()

    finished = pipeline.abort(("a", 1))

    assert finished is not None
    assert finished.reason is FinishReason.CANCELLED
    assert not pipeline.scheduler.has(("a", 1))
    assert pipeline.scheduler.blocks_used == 2
    pipeline.deliver()
    assert pipeline.scheduler.blocks_used == 2
    pipeline.deliver()
    assert pipeline.scheduler.blocks_used == 0
    pipeline.drain()


def test_aborting_what_is_not_here_says_so() -> None:
    assert Pipeline(config()).abort(("nobody", 1)) is None


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "problem"),
    [
        (512, 1, "prompt: 512 tokens; it must be 1 to 511"),
        (0, 1, "prompt: 0 tokens"),
    ],
)
def test_a_request_that_can_never_run_fails_with_the_reason(
    num_prompt: int, max_tokens: int, problem: str
) -> None:
    pipeline = Pipeline(config(num_blocks=4))

    pipeline.add(request(num_prompt=num_prompt, max_tokens=max_tokens))

    end = pipeline.ends["a", 1]
    assert isinstance(end, SequenceFailed)
    assert end.reason.startswith(problem)
    assert pipeline.scheduler.idle


def test_a_bad_row_fails_alone() -> None:
    pipeline = Pipeline(config())
    pipeline.add(request("good", max_tokens=3))
    pipeline.add(request("bad", max_tokens=3))
    pipeline.schedule(bad=(1,))
    pipeline.deliver()

    pipeline.drain()

    assert pipeline.ends["bad", 1] == SequenceFailed(
        key=("bad", 1), reason="the model's logits were not finite"
    )
    assert pipeline.outputs["good", 1] == expected_output(request("good"), 3)


def test_a_new_epoch_prefills_prompt_and_emitted_tokens_again_from_step_0() -> None:
    pipeline = Pipeline(config(num_lanes=2))
    decoding(pipeline, "a", "b")
    pipeline.schedule()

    pipeline.rebuild(num_blocks=50, num_lanes=1)

    plan = pipeline.schedule()
    assert plan is not None
    assert plan.step == 0
    assert shape(plan) == [(2, 0, 6), (3, 0, 6)]
    assert [record.ids[5:] for record in plan.opens] == [
        (pipeline.outputs[name, 1][0],) for name in "ab"
    ]


def test_a_new_epoch_does_not_bring_back_what_was_aborted_in_flight() -> None:
    pipeline = Pipeline(config())
    pipeline.add(request(num_prompt=20))
    pipeline.schedule()
    pipeline.abort(("a", 1))

    pipeline.rebuild(num_blocks=50)

    assert pipeline.scheduler.idle
    assert pipeline.scheduler.schedule() is None


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (StepResult(step=1, tokens=((1,),)), "result of step 1, expected 0"),
        (StepResult(step=0, tokens=()), "wants 1 tokens, got 0"),
        (StepResult(step=0, tokens=((1,),), logprobs=((None,), (None,))), "wants 1 tokens"),
    ],
)
def test_an_answer_that_does_not_fit_its_step_breaks_the_protocol(
    result: StepResult, problem: str
) -> None:
    pipeline = Pipeline(config())
    pipeline.add(request())
    pipeline.schedule()

    with pytest.raises(ProtocolError, match=problem):
        pipeline.scheduler.apply(result)


def test_an_answer_that_nobody_waits_for_breaks_the_protocol() -> None:
    with pytest.raises(ProtocolError, match="expected none"):
        Pipeline(config()).scheduler.apply(StepResult(step=0, tokens=()))


def test_the_vocabulary_of_the_simulation_ends_some_outputs_early() -> None:
    lengths = {len(expected_output(request(str(number)), 400)) for number in range(20)}

    assert min(lengths) < NUM_TOKENS < max(lengths)
