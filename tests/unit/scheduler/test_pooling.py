"""Sequences of a model that pools: each whole in one step, ended by its vector."""

from __future__ import annotations

import pytest

from shardline.base.errors import ProtocolError
from shardline.contract.job import FinishReason
from shardline_scheduler.events import SequenceFailed, SequenceFinished
from shardline_scheduler.scheduler import NOT_FINITE, Scheduler
from shardline_scheduler.step_plan import StepPlan, StepResult
from tests.simulation.pipeline import Numbers, config, request

BUDGET = 100


def pooling(*lengths: int, **fields: int) -> Scheduler:
    """A scheduler with sequences of these lengths."""
    terms = {"max_seats": 8, "num_lanes": 2, "num_blocks": 100, **fields}
    scheduler = Scheduler(
        config(token_budget=BUDGET, max_len=BUDGET, pools=True, prefix_cache=False, **terms)
    )
    for place, length in enumerate(lengths):
        scheduler.add(request(str(place), num_prompt=length, max_tokens=1), Numbers(9))
    return scheduler


def taken(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def answer(plan: StepPlan, *empty: int) -> StepResult:
    """A vector for each row but those of these places."""
    vectors = tuple(b"" if at in empty else bytes([at] * 4) for at in range(len(plan.rows)))
    return StepResult(plan.step, (), vectors=vectors)


def test_a_text_is_never_cut_and_the_next_step_begins_with_what_did_not_fit() -> None:
    scheduler = pooling(60, 40, 50, BUDGET)
    steps = [taken(scheduler), taken(scheduler)]
    assert [[row.length for row in step.rows] for step in steps] == [[60, 40], [50]]
    assert not any(row.wants for step in steps for row in step.rows)
    scheduler.apply(answer(steps[0]))
    assert [row.length for row in taken(scheduler).rows] == [BUDGET]


def test_a_vector_ends_its_sequence_and_gives_all_blocks_back() -> None:
    scheduler = pooling(60, 40)
    events = scheduler.apply(answer(taken(scheduler)))
    assert events == [
        SequenceFinished(
            key=(str(place), 1),
            reason=FinishReason.STOP,
            output_ids=(),
            text="",
            logprobs=None,
            vector=bytes([place] * 4),
        )
        for place in range(2)
    ]
    assert len(taken(scheduler).closes) == 2
    assert scheduler.blocks_used == 0


def test_what_is_not_finite_fails_alone() -> None:
    scheduler = pooling(60, 40)
    first, second = scheduler.apply(answer(taken(scheduler), 0))
    assert first == SequenceFailed(key=("0", 1), reason=NOT_FINITE)
    assert isinstance(second, SequenceFinished)


def test_a_text_that_fits_no_step_is_refused() -> None:
    scheduler = pooling()
    events = scheduler.add(request("long", num_prompt=BUDGET + 1, max_tokens=1), Numbers(9))
    assert [type(event) for event in events] == [SequenceFailed]


def test_an_answer_with_other_rows_is_no_answer() -> None:
    scheduler = pooling(60, 40)
    plan = taken(scheduler)
    with pytest.raises(ProtocolError, match="has 1 vectors"):
        scheduler.apply(StepResult(plan.step, (), vectors=(b"1234",)))


def test_after_a_broken_epoch_each_text_runs_alone_and_none_is_lost() -> None:
    # Given two texts in a step that never came back
    scheduler = pooling(60, 40)
    taken(scheduler)
    assert scheduler.rebuild(100) == []

    # When the next epoch runs, then they come one by one, as one of them may have broken it
    found: list[str] = []
    while not scheduler.idle:
        plan = taken(scheduler)
        assert len(plan.rows) <= 1
        events = scheduler.apply(answer(plan))
        found += [event.key[0] for event in events if isinstance(event, SequenceFinished)]
    assert sorted(found) == ["0", "1"]
