"""Prompt lookup: what is guessed, for whom there is room, and what becomes of guesses that come
true or do not."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.base.errors import ProtocolError
from shardline.contract.job import FinishReason
from shardline_scheduler import prompt_lookup
from shardline_scheduler.events import NewTokens, SequenceFailed, SequenceFinished
from shardline_scheduler.kv_blocks import BLOCK_TOKENS
from shardline_scheduler.prompt_lookup import MAX_MISSES, PromptLookup
from shardline_scheduler.sequence import Request
from shardline_scheduler.step_plan import Row, StepPlan, StepResult
from tests.simulation.pipeline import Numbers, Pipeline, checked, config, expected_output, request

TEXT = [*range(10, 30)]


def test_what_followed_the_last_tokens_is_guessed_twice_as_far_as_they_match() -> None:
    assert PromptLookup().draft([*TEXT, 99, 12, 13, 14], 16) == tuple(range(15, 21))


def test_no_more_is_guessed_than_there_is_room_for() -> None:
    assert PromptLookup().draft([*TEXT, 12, 13, 14], 4) == (15, 16, 17, 18)
    assert PromptLookup().draft([*TEXT, 12, 13, 14], 0) == ()
    assert PromptLookup().draft([*TEXT, 12, 13, 14], -3) == ()


@pytest.mark.parametrize("ids", [[], [1], [1, 2], TEXT, [*TEXT, 13]], ids=len)
def test_text_without_repetition_is_not_guessed(ids: list[int]) -> None:
    assert PromptLookup().draft(ids, 16) == ()


def test_the_longest_match_is_followed_and_of_equals_the_latest() -> None:
    longer = [1, 2, 3, 4, 50]
    shorter = [9, 3, 4, 60]

    assert PromptLookup().draft([*longer, *shorter, 2, 3, 4], 1) == (50,)
    assert PromptLookup().draft([*longer, *shorter, 8, 3, 4], 1) == (60,)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_text_that_goes_in_circles_goes_on_in_them(size: int) -> None:
    circle = TEXT[:size]

    assert PromptLookup().draft(circle * 8, 7) == tuple((circle * 8)[:7])


def test_after_each_miss_a_longer_match_is_asked_for_until_a_guess_comes_true() -> None:
    lookup = PromptLookup()
    ids = [*TEXT, 12, 13, 14]
    lookup.learn(0)
    assert lookup.draft(ids, 4)
    lookup.learn(0)
    assert not lookup.draft(ids, 4)

    lookup.learn(1)

    assert lookup.draft(ids, 4)


def test_a_copy_that_differs_by_a_token_is_followed_behind_it() -> None:
    lookup = PromptLookup()
    ids = [*TEXT, 12, 13, 14]
    assert lookup.draft(ids, 4) == (15, 16, 17, 18)
    lookup.learn(1)

    assert lookup.draft([*ids, 15, 99], 16) == (17, 18, 19, 20)
    lookup.learn(0)
    assert lookup.draft([*ids, 15, 99, 98], 16) == (18, 19, 20, 21)
    lookup.learn(0)
    assert lookup.draft([*ids, 15, 99, 98, 97], 16) == ()


def test_a_long_copy_is_found_after_any_number_of_misses() -> None:
    lookup = PromptLookup()
    for _ in range(10 * MAX_MISSES):
        lookup.learn(0)

    assert lookup.draft([*TEXT, *TEXT[:10]], 4) == tuple(TEXT[10:14])


def test_only_so_many_tokens_are_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_lookup, "WINDOW", 40)

    assert PromptLookup().draft([*TEXT, *range(100, 140), 12, 13, 14], 4) == ()
    assert PromptLookup().draft([*TEXT, *range(100, 130), 102, 103], 2) == (104, 105)


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(1, 8), max_size=8))
def test_an_index_that_grew_guesses_as_one_that_is_new(ids: list[int], steps: list[int]) -> None:
    grown = PromptLookup()
    end = 0
    for step in steps:
        end += step
        guessed = grown.draft(ids[:end], 8)

        assert guessed == PromptLookup().draft(ids[:end], 8)
        for num_accepted in (0, 0, 1):
            grown.learn(num_accepted)


# In the scheduler.


def guessed(name: str = "a", **fields: Any) -> Request:
    """A job of whose output most tokens can be guessed."""
    return request(name, repeats=True, **fields)


def pipeline_with(*jobs: Request, **changes: Any) -> Pipeline:
    """Jobs of which nothing is computed."""
    pipeline = Pipeline(config(**{"prompt_lookup": 16, **changes}))
    for job in jobs:
        pipeline.add(job)
    return pipeline


def turn(pipeline: Pipeline) -> tuple[tuple[Row, ...], list[Any]]:
    """One step and its answer."""
    return checked(pipeline.schedule()).rows, pipeline.deliver()


def turn_with(pipeline: Pipeline, num_accepted: int) -> tuple[Row, NewTokens]:
    """Goes on to the first step of one job in which so many guesses or more came true."""
    for _ in range(500):
        (row,), events = turn(pipeline)
        if len(row.drafts) >= num_accepted and len(events[0].ids) > num_accepted:
            return row, events[0]
    raise AssertionError("no such step")


def guess(pipeline: Pipeline) -> StepPlan:
    """Goes on to a step with guesses, which is in flight then."""
    for _ in range(500):
        if (plan := checked(pipeline.schedule())).num_drafts:
            return plan
        pipeline.deliver()
    raise AssertionError("no guesses")


def finished(name: str, limit: int) -> str:
    """A job of this kind whose output has so many tokens."""
    return next(
        f"{name} {number}"
        for number in count()
        if len(expected_output(guessed(f"{name} {number}"), limit)) == limit
    )


def test_guesses_that_come_true_are_one_event_and_the_output_stays_the_same() -> None:
    job = guessed(finished("a", 100), max_tokens=100)
    pipeline = pipeline_with(job)
    expected = expected_output(job, 100)

    row, event = turn_with(pipeline, 3)

    assert event.ids == tuple(expected[event.start :][: len(event.ids)])
    assert event.ids[:-1] == row.drafts[: len(event.ids) - 1]
    assert event.text == "".join(f"{token} " for token in event.ids)
    pipeline.drain()
    assert pipeline.outputs[job.key] == expected
    assert pipeline.stages.num_steps < 80


def test_the_next_row_begins_behind_the_guesses_that_came_true() -> None:
    pipeline = pipeline_with(guessed(finished("a", 100), max_tokens=100))

    row, event = turn_with(pipeline, 1)
    (after,) = checked(pipeline.schedule()).rows

    assert after.start == row.start + len(event.ids)
    assert after.ids == event.ids[-1:]


def test_nothing_is_guessed_when_it_is_switched_off() -> None:
    pipeline = pipeline_with(guessed(max_tokens=60), prompt_lookup=0)

    while not pipeline.scheduler.idle:
        rows, _ = turn(pipeline)
        assert not any(row.drafts for row in rows)


@pytest.mark.parametrize(("num_jobs", "most"), [(1, 12), (2, 7), (5, 3), (8, 1)])
def test_decodes_of_a_step_share_the_rows_that_there_are(num_jobs: int, most: int) -> None:
    pipeline = pipeline_with(
        *(guessed(finished(f"job {each}", 100), max_tokens=100) for each in range(num_jobs))
    )
    longest = 0

    while not pipeline.scheduler.idle:
        rows, _ = turn(pipeline)
        if len(rows) == num_jobs and all(row.decodes for row in rows):
            assert sum(row.length for row in rows) <= 16
            longest = max(longest, *(len(row.drafts) for row in rows))

    assert longest >= most


def test_a_full_batch_has_no_guesses() -> None:
    pipeline = pipeline_with(
        *(guessed(f"job {each}", max_tokens=60) for each in range(16)), max_seats=16
    )

    for _ in range(40):
        rows, _ = turn(pipeline)
        assert len(rows) < 16 or not any(row.drafts for row in rows)


def test_guesses_leave_half_of_a_small_budget_to_prompts() -> None:
    pipeline = pipeline_with(guessed(finished("a", 100), max_tokens=100), token_budget=8)
    turn_with(pipeline, 3)
    pipeline.add(request("b", num_prompt=40))

    rows, _ = turn(pipeline)

    assert rows[0].length <= 4
    assert sum(row.length for row in rows) == 8


def test_no_guess_goes_past_the_last_token_that_there_can_be() -> None:
    limit = 50
    job = guessed(finished("a", limit), max_tokens=limit)
    pipeline = pipeline_with(job)

    while not pipeline.scheduler.idle:
        for row in turn(pipeline)[0]:
            assert row.start + row.length < len(job.prompt_ids) + limit

    end = pipeline.ends[job.key]
    assert isinstance(end, SequenceFinished)
    assert (end.reason, len(end.output_ids)) == (FinishReason.LENGTH, limit)


class StopsAt(Numbers):
    """Ends after so many tokens, which the request does not say, as a stop string does."""

    def push(self, token_id: int) -> tuple[str, FinishReason | None]:
        text, reason = super().push(token_id)
        return text, FinishReason.STOP if reason else None


def test_a_stop_among_guesses_that_came_true_drops_those_behind_it() -> None:
    job = guessed(finished("a", 200))
    probe = pipeline_with(job)
    _, event = turn_with(probe, 4)
    num = event.start + 2
    pipeline = Pipeline(config(prompt_lookup=16))
    pipeline.outputs[job.key], pipeline.texts[job.key] = [], ""
    pipeline.hear(pipeline.scheduler.add(job, StopsAt(num)))

    pipeline.drain()

    end = pipeline.ends[job.key]
    assert isinstance(end, SequenceFinished)
    assert end.reason is FinishReason.STOP
    assert list(end.output_ids) == pipeline.outputs[job.key] == expected_output(job, 200)[:num]


def test_logits_that_are_not_finite_fail_a_job_after_the_guesses_that_came_true() -> None:
    job = guessed(finished("a", 200))
    probe = pipeline_with(job)
    row, event = turn_with(probe, 4)
    pipeline = pipeline_with(job)
    while len(pipeline.outputs[job.key]) < event.start:
        turn(pipeline)

    (number,) = pipeline.scheduler._batch.running
    plan = checked(pipeline.schedule(bad=(number,)))
    events = pipeline.deliver()

    assert plan.rows[0].drafts == row.drafts
    accepted, failed = events
    assert isinstance(accepted, NewTokens)
    assert isinstance(failed, SequenceFailed)
    assert accepted.ids == event.ids[:-1]
    pipeline.drain()


def test_an_abort_in_flight_drops_guesses_and_frees_their_blocks() -> None:
    job = guessed(finished("a", 200))
    pipeline = pipeline_with(job)
    guess(pipeline)

    pipeline.abort(job.key)
    pipeline.deliver()

    pipeline.drain()
    assert pipeline.outputs[job.key] == expected_output(job, 200)[: len(pipeline.outputs[job.key])]


def test_a_new_epoch_forgets_guesses_in_flight() -> None:
    job = guessed(finished("a", 100), max_tokens=100)
    pipeline = pipeline_with(job)
    guess(pipeline)

    pipeline.rebuild(num_blocks=50)
    pipeline.drain()

    assert pipeline.outputs[job.key] == expected_output(job, 100)


def test_guesses_take_the_last_block_from_nobody() -> None:
    jobs = [
        guessed(finished(name, 50), num_prompt=BLOCK_TOKENS - 10, max_tokens=50) for name in "ab"
    ]
    pipeline = pipeline_with(*jobs, num_blocks=2, prefix_cache=False)
    seen = 0

    while not pipeline.scheduler.idle:
        rows, _ = turn(pipeline)
        for row in rows:
            places = (
                len(pipeline.stages.tables[row.seq].blocks)
                if row.seq in pipeline.stages.tables
                else 2
            )
            seen = max(seen, len(row.drafts))
            assert row.start + row.length <= places * BLOCK_TOKENS

    assert seen
    assert [pipeline.outputs[job.key] for job in jobs] == [expected_output(job, 50) for job in jobs]


def test_a_block_is_found_by_others_only_once_its_guesses_came_true() -> None:
    job = guessed(finished("a", 200), max_tokens=200)
    pipeline = pipeline_with(job)
    wrong = 0

    while not pipeline.scheduler.idle:
        plan = pipeline.schedule()
        rows = plan.rows if plan else ()
        for sequence in pipeline.scheduler._batch.running.values():
            certain = (len(sequence.ids) - 1 + 1) // BLOCK_TOKENS
            assert sequence.num_named <= certain
            wrong += any(row.start + row.length > (certain + 1) * BLOCK_TOKENS for row in rows)
        pipeline.deliver()

    assert wrong, "guesses crossed the end of a block"


def test_blocks_that_guesses_filled_are_found_after_the_end() -> None:
    job = guessed(finished("a", 200), max_tokens=200)
    pipeline = pipeline_with(job)
    pipeline.drain()
    known = (*job.prompt_ids, *pipeline.outputs[job.key])
    again = request("b", max_tokens=3)
    again = Request(key=again.key, prompt_ids=(*known, 1, 2), params=again.params, seed=again.seed)

    pipeline.add(again)
    pipeline.drain()

    end = pipeline.ends[again.key]
    assert isinstance(end, SequenceFinished)
    assert end.num_cached == (len(known) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize(
    "tokens",
    [(), ((),), ((1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1),), ((98, 97),)],
    ids=len,
)
def test_an_answer_that_follows_other_guesses_breaks_the_protocol(
    tokens: tuple[tuple[int, ...], ...],
) -> None:
    pipeline = pipeline_with(guessed(finished("a", 100), max_tokens=100))
    plan = guess(pipeline)

    with pytest.raises(ProtocolError, match=f"step {plan.step}"):
        pipeline.scheduler.apply(StepResult(plan.step, tokens))
