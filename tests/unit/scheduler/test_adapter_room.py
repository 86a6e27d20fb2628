"""Adapters of open sequences: no more at once than stages hold; who finds no place waits, who is
refused fails."""

from __future__ import annotations

from shardline_scheduler.events import SequenceFailed
from shardline_scheduler.scheduler import Scheduler
from shardline_scheduler.step_plan import StepPlan, StepResult
from tests.simulation.pipeline import Numbers, Pipeline, config, request


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
