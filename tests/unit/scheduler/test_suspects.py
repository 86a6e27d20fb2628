"""Jobs that may have broken a pipeline: a new epoch runs them one at a time, and blames the one
that breaks it alone."""

from __future__ import annotations

from dataclasses import replace

from shardline_scheduler.events import SequenceCrashed
from tests.simulation.pipeline import (
    Pipeline,
    checked,
    config,
    decoding,
    expected_output,
    request,
    shape,
)


def test_suspects_run_one_at_a_time_and_hold_up_nobody() -> None:
    pipeline = Pipeline(config())
    for name, suspect in [("a", True), ("b", True), ("c", False)]:
        pipeline.add(request(name, max_tokens=1, quarantined=suspect))

    plan = pipeline.schedule()

    assert plan is not None
    assert [record.seed for record in plan.opens] == [request("a").seed, request("c").seed]
    pipeline.deliver()
    assert shape(pipeline.schedule()) == [(2, 0, 5)]


def test_jobs_that_a_lost_epoch_gave_no_token_come_back_one_by_one() -> None:
    pipeline = Pipeline(config())
    decoding(pipeline, "proven")
    pipeline.add(request("a", num_prompt=7))
    pipeline.add(request("b", num_prompt=8, max_tokens=9))
    pipeline.schedule()

    pipeline.rebuild(num_blocks=50)

    assert [row.length for row in checked(pipeline.schedule()).rows] == [6, 7], (
        "b waits until a has a token"
    )
    pipeline.deliver()
    assert [row.length for row in checked(pipeline.schedule()).rows if not row.decodes] == [8]
    pipeline.drain()
    assert pipeline.outputs["b", 1] == expected_output(request("b", num_prompt=8), 9)


def test_the_only_suspect_that_breaks_the_pipeline_again_is_blamed_alone() -> None:
    pipeline = Pipeline(config())
    for name in ("poison", "good", "better"):
        pipeline.add(request(name, max_tokens=9))
    for _ in range(2):
        pipeline.schedule()
        pipeline.rebuild(num_blocks=50)

    assert pipeline.ends == {("poison", 1): SequenceCrashed(key=("poison", 1))}
    pipeline.drain()
    assert pipeline.outputs["good", 1] == expected_output(request("good"), 9)
    assert pipeline.outputs["better", 1] == expected_output(request("better"), 9)


def test_a_quarantined_job_that_comes_back_as_a_new_attempt_stays_quarantined() -> None:
    pipeline = Pipeline(config())
    for name in ("one", "other"):
        pipeline.add(request(name))
    pipeline.schedule()
    pipeline.rebuild(num_blocks=50)
    for name in ("one", "other"):
        pipeline.scheduler.abort((name, 1))
        pipeline.add(replace(request(name), key=(name, 2)))

    assert len(checked(pipeline.schedule()).rows) == 1


def test_a_job_with_a_crash_behind_it_keeps_others_waiting_until_it_is_trusted() -> None:
    pipeline = Pipeline(config())
    pipeline.add(request("first", quarantined=True))
    pipeline.add(request("second", quarantined=True))
    pipeline.schedule()
    pipeline.deliver()
    assert len(checked(pipeline.schedule()).rows) == 1
    pipeline.deliver()

    pipeline.scheduler.release(("first", 1))

    assert len(checked(pipeline.schedule()).rows) == 2
