"""Where a stage's time goes: work, waits and the idle time that counts for no stage."""

from __future__ import annotations

import pytest

from shardline_scheduler.step_plan import Row, StepPlan
from shardline_scheduler.step_times import NUM_KEPT, EngineProgress, StepTime, StepTimes

ROWS = (Row(1, 9, 1, (5,), (), wants=True), Row(2, 0, 7, (), (0,), wants=False))


def plan(step: int, *, idle_us: int = 0) -> StepPlan:
    return StepPlan(step, (), ROWS, (), idle_us)


def finish(progress: EngineProgress, step: int, began_s: float, *, idle_us: int = 0) -> StepTime:
    """A step of 2 s: half a second before and after one second of computation."""
    return progress.finish(
        plan(step, idle_us=idle_us), began_s, began_s + 0.5, began_s + 1.5, began_s + 2.0
    )


def test_a_step_tells_its_rows_its_work_and_its_wait() -> None:
    progress = EngineProgress(epoch=3)
    finish(progress, 0, 10.0)
    time = finish(progress, 1, 15.0)
    assert (time.epoch, time.step, time.num_rows, time.num_tokens) == (3, 1, 2, 8)
    assert (time.num_context, time.num_sampled) == (17, 1)
    assert (time.wait_s, time.compute_s, time.hop_s, time.idle_s) == (3.0, 1.0, 1.0, 0.0)
    assert (progress.num_steps, progress.wait_s, progress.compute_s, progress.hop_s) == (
        2,
        3.0,
        2.0,
        2.0,
    )
    assert progress.bubble_share == pytest.approx(1 - 2 / 7)


def test_time_before_the_first_step_is_no_wait() -> None:
    progress = EngineProgress(epoch=1)
    assert progress.bubble_share == 0.0
    assert finish(progress, 0, 100.0).wait_s == 0.0
    assert progress.bubble_share == 0.5


def test_the_pipelines_idle_time_is_no_wait() -> None:
    progress = EngineProgress(epoch=1)
    finish(progress, 0, 0.0)
    assert finish(progress, 1, 10.0, idle_us=6_500_000).wait_s == pytest.approx(1.5)
    assert finish(progress, 2, 13.0, idle_us=9_000_000).wait_s == 0.0, (
        "clocks of two stages differ a little"
    )


def test_work_between_steps_is_a_hop_and_no_wait() -> None:
    progress = EngineProgress(epoch=1)
    finish(progress, 0, 0.0)
    progress.work(0.75)
    time = finish(progress, 1, 3.0)
    assert (time.wait_s, time.hop_s) == (0.25, 1.75)
    assert progress.hop_s == 2.75
    assert finish(progress, 2, 6.0).hop_s == 1.0, "counted once"


def test_time_of_steps_that_overlap_on_a_device_is_counted_once() -> None:
    progress = EngineProgress(epoch=1)
    # The next step came at 12 and was launched at 13; this one was computed at 20.
    first = progress.finish(plan(0), 10.0, 11.0, 20.0, 20.0)
    second = progress.finish(plan(1), 12.0, 13.0, 28.0, 30.0)
    assert (first.hop_s, first.compute_s) == (1.0, 9.0)
    assert (second.began_s, second.compute_began_s) == (20.0, 20.0)
    assert (second.wait_s, second.hop_s, second.compute_s) == (0.0, 2.0, 8.0)
    assert progress.compute_s + progress.hop_s + progress.wait_s == 20.0, "from 10 to 30"


def test_the_last_steps_are_kept_in_order() -> None:
    times = StepTimes()
    progress = EngineProgress(epoch=1)
    for step in range(NUM_KEPT + 3):
        times.add(finish(progress, step, 2.0 * step))
    assert [time.step for time in times.last()] == list(range(3, NUM_KEPT + 3))
