"""Adapters of open sequences: no more at once than stages hold; who finds no place waits, who is
refused fails."""

from __future__ import annotations

from typing import Any

import pytest

from shardline_scheduler.events import SequenceFailed
from shardline_scheduler.scheduler import Scheduler
from shardline_scheduler.sequence import MAX_OVERTAKEN
from shardline_scheduler.step_plan import StepPlan, StepResult
from tests.simulation.pipeline import Numbers, Pipeline, checked, config, request


def opened(plan: StepPlan | None) -> list[str]:
    """The adapters with which sequences open."""
    assert plan is not None
    return [one.adapter for one in plan.opens]


def test_a_job_waits_until_an_open_one_gives_its_adapters_place_back() -> None:
    # Given two places, and jobs of three adapters, of which the first two find theirs
    pipeline = Pipeline(config(max_adapters=2))
    for name, adapter in (("a", "x"), ("b", "y"), ("c", "z"), ("d", "x"), ("e", "")):
        pipeline.add(request(name, max_tokens=2 if name == "b" else 100, adapter=adapter))
    assert opened(pipeline.schedule()) == ["x", "y", "x", ""]
    pipeline.deliver()
    assert opened(pipeline.schedule()) == []

    # When one of them has ended
    pipeline.deliver()

    # Then the third opens in the step after the one that closes it: a stage opens before it closes
    closing = pipeline.schedule()
    assert closing is not None
    assert (opened(closing), len(closing.closes)) == ([], 1)
    pipeline.deliver()
    assert opened(pipeline.schedule()) == ["z"]


def test_a_new_epoch_has_all_places_free() -> None:
    pipeline = Pipeline(config(max_adapters=1))
    pipeline.add(request("a", adapter="x"))
    pipeline.schedule()

    pipeline.rebuild(100)

    assert opened(pipeline.schedule()) == ["x"]


def test_a_sequence_that_a_stage_refuses_fails_and_its_kv_is_found_by_nobody() -> None:
    # Given two jobs of which a stage refuses one
    scheduler = Scheduler(config())
    for name, adapter in (("a", "x"), ("b", "")):
        scheduler.add(request(name, num_prompt=100, num_common=100, adapter=adapter), Numbers(9))
    plan = scheduler.schedule()
    assert plan is not None
    refused = ((plan.opens[0].seq, "layers 2-3: no such adapter"),)

    # When the tail says so
    events = scheduler.apply(
        StepResult(plan.step, tuple((5,) for row in plan.rows if row.wants), refused=refused)
    )

    # Then it fails with the reason, the other one goes on, and a later one computes the prompt anew
    assert [event for event in events if isinstance(event, SequenceFailed)] == [
        SequenceFailed(key=("a", 1), reason="layers 2-3: no such adapter")
    ]
    assert scheduler.has(("b", 1))
    scheduler.add(request("c", num_prompt=100, num_common=100, adapter="x"), Numbers(9))
    following = scheduler.schedule()
    assert following is not None
    assert [one.num_cached for one in following.opens] == [0]


@pytest.mark.parametrize("is_bad", [False, True])
def test_who_was_cancelled_before_its_refusal_leaves_no_kv(is_bad: bool) -> None:
    scheduler = Scheduler(config())
    adapter = "" if is_bad else "x"
    prompt: dict[str, Any] = {"num_prompt": 100, "num_common": 100, "adapter": adapter}
    scheduler.add(request("a", **prompt), Numbers(9))
    plan = checked(scheduler.schedule())
    number = plan.opens[0].seq
    scheduler.abort(("a", 1))

    bad, refused = ((number,), ()) if is_bad else ((), ((number, "no such adapter"),))
    assert scheduler.apply(StepResult(plan.step, ((5,),), bad=bad, refused=refused)) == []

    scheduler.add(request("c", **prompt), Numbers(9))
    assert [one.num_cached for one in checked(scheduler.schedule()).opens] == [0]


def test_who_leaves_before_the_stages_answer_is_found_by_nobody() -> None:
    # Given that a stage may refuse its adapter
    scheduler = Scheduler(config(num_lanes=3))
    prompt: dict[str, Any] = {"num_prompt": 100, "num_common": 100, "adapter": "x"}
    scheduler.add(request("a", **prompt), Numbers(9))
    scheduler.schedule()
    scheduler.abort(("a", 1))

    scheduler.add(request("c", **prompt), Numbers(9))

    assert [one.num_cached for one in checked(scheduler.schedule()).opens] == [0]


def test_jobs_without_adapters_do_not_wait_for_one_that_waits_for_a_place() -> None:
    # Given more of them than a job's patience
    pipeline = Pipeline(config(max_adapters=1, max_seats=4))
    for name, adapter in (("a", "x"), ("b", "y")):
        pipeline.add(request(name, max_tokens=400, adapter=adapter))
    names = [f"other-{number}" for number in range(MAX_OVERTAKEN + 8)]
    for name in names:
        pipeline.add(request(name, max_tokens=1))

    while pipeline.scheduler.has(("a", 1)):
        pipeline.turn()

    assert all(pipeline.outputs[(name, 1)] for name in names)
    pipeline.drain()
