"""Log-probabilities of prompts: every row of the prompt is computed once, in any chunks, and the
completion ends with all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardline.base.errors import ProtocolError
from shardline_scheduler.events import SequenceFinished
from shardline_scheduler.kv_blocks import BLOCK_TOKENS
from shardline_scheduler.sequence import Request
from shardline_scheduler.step_cutter import MAX_SCORED
from shardline_scheduler.step_plan import StepResult
from tests.simulation.pipeline import (
    Pipeline,
    checked,
    config,
    expected_output,
    expected_scores,
    request,
)

NUM_PROMPT = 5 * BLOCK_TOKENS


def scored(name: str = "a", **fields: Any) -> Request:
    """A prompt that begins as all of its kind do."""
    usual = {"num_prompt": NUM_PROMPT, "num_common": NUM_PROMPT - 5, "max_tokens": 4}
    return request(name, **{**usual, "prompt_logprobs": 2, **fields})


def check(pipeline: Pipeline, job: Request) -> None:
    """It ended as it would have alone, with the log-probabilities of its prompt."""
    pipeline.drain()
    end = pipeline.ends[job.key]
    assert isinstance(end, SequenceFinished)
    assert list(end.output_ids) == expected_output(job, job.params.max_tokens or 1)
    assert end.prompt_logprobs == expected_scores(job)
    assert end.prompt_logprobs is None or len(end.prompt_logprobs) == NUM_PROMPT


@pytest.mark.parametrize("num_lanes", [1, 3])
@pytest.mark.parametrize("token_budget", [7, 100, 4096])
def test_they_do_not_depend_on_chunks_or_on_what_is_cached(
    token_budget: int, num_lanes: int
) -> None:
    pipeline = Pipeline(config(token_budget=token_budget, num_lanes=num_lanes))
    jobs = [scored("before", prompt_logprobs=None), scored("a"), scored("b"), scored("c")]
    for job in jobs:
        pipeline.add(job)

    for job in jobs:
        check(pipeline, job)
    again = scored("again")
    pipeline.add(again)
    check(pipeline, again)


def test_a_step_has_a_bounded_number_of_them_and_other_chunks_go_on() -> None:
    pipeline = Pipeline(config(token_budget=4096, max_len=1024))
    jobs = [scored("a"), scored("b", tenant="b"), scored("c", prompt_logprobs=None, tenant="c")]
    for job in jobs:
        pipeline.add(job)

    rows = checked(pipeline.schedule()).rows

    assert [row.length for row in rows] == [MAX_SCORED, 1, NUM_PROMPT]
    pipeline.deliver()
    for job in jobs:
        check(pipeline, job)


def test_what_is_scored_is_not_scored_again_after_a_preemption() -> None:
    pipeline = Pipeline(config(num_blocks=8, token_budget=70))
    first = request("first", num_prompt=128, max_tokens=150, priority=0)
    job = scored(priority=1, max_tokens=60)
    pipeline.add(first)
    pipeline.add(job)
    known: list[int] = []
    while not pipeline.scheduler.idle:
        plan = pipeline.schedule()
        opens = plan.opens if plan else ()
        known += [each.num_scored for each in opens if each.params.prompt_logprobs is not None]
        if pipeline.flights:
            pipeline.deliver()

    assert known[0] == 0
    assert known[-1] > 0, "it was preempted"
    check(pipeline, job)


def test_a_new_epoch_goes_on_behind_those_that_are_known() -> None:
    pipeline = Pipeline(config(token_budget=100))
    job = scored()
    pipeline.add(job)
    pipeline.schedule()
    pipeline.deliver()

    pipeline.rebuild(100)

    (opened,) = checked(pipeline.schedule()).opens
    assert (opened.num_cached, opened.num_scored) == (0, 100)
    pipeline.deliver()
    check(pipeline, job)


def test_a_completion_that_was_whole_is_scored_before_it_ends() -> None:
    job = scored()
    whole = replace(job, output_ids=tuple(expected_output(job, 4)))
    pipeline = Pipeline(config(token_budget=100))

    pipeline.add(whole)

    assert whole.key not in pipeline.ends
    check(pipeline, whole)


def test_who_is_canceled_before_has_none() -> None:
    pipeline = Pipeline(config(token_budget=100))
    job = scored()
    pipeline.add(job)
    pipeline.schedule()
    pipeline.deliver()

    end = pipeline.abort(job.key)

    assert end is not None
    assert end.prompt_logprobs is None


@pytest.mark.parametrize("change", ["none", "others", "again"])
def test_a_tail_that_scores_other_tokens_is_refused(change: str) -> None:
    pipeline = Pipeline(config(token_budget=NUM_PROMPT))
    pipeline.add(scored())
    for _ in range(2):
        pipeline.schedule()
        plan, result, _ = pipeline.flights.popleft()
        (told,) = result.scored
        if plan.rows[0].wants:
            break
        pipeline.scheduler.apply(result)
    wrong = {
        "none": (),
        "others": (type(told)(told.seq, told.start, told.logprobs[1:]),),
        "again": (type(told)(told.seq, told.start - 1, told.logprobs),),
    }[change]

    with pytest.raises(ProtocolError, match="score"):
        pipeline.scheduler.apply(StepResult(plan.step, result.tokens, scored=wrong))
