"""Drift: steps that take longer than the profile says, for long, and no other steps."""

from __future__ import annotations

import pytest

from shardline_costs.drift import DRIFT, NUM_WINDOWS, WINDOW_STEPS, Drift, step_kind
from shardline_costs.step_cost import compute_s
from shardline_scheduler.step_plan import Move, Row, StepPlan
from tests.simulation.pipeline import Pipeline, config, request
from tests.unit.fleet.planner.fleets import LAYER_S, device, model

DECODES = tuple(Row(seq, 9, 1, (5,), (), wants=True) for seq in range(4))
PLAN = StepPlan(0, (), DECODES, ())
STEP_S = 6 * LAYER_S


def drift(*, last: bool = False, streams: bool = False) -> Drift:
    layers = range(6, 12) if last else range(6)
    window_s = WINDOW_STEPS * STEP_S / 2
    return Drift(device("a:0", tail_s=LAYER_S), model(), layers, window_s=window_s, streams=streams)


def windows(of: Drift, num: int, taken_s: float) -> None:
    for _ in range(num * WINDOW_STEPS):
        of.add(PLAN, taken_s)


def test_steps_as_long_as_the_profile_says_are_no_drift() -> None:
    first = drift()
    last = drift(last=True)
    windows(first, 2 * NUM_WINDOWS, STEP_S)
    windows(last, 2 * NUM_WINDOWS, STEP_S + LAYER_S)
    assert [first.ratio, last.ratio] == pytest.approx([1.0, 1.0]), (
        "the tail has its output layer, too"
    )
    assert (first.take(), last.take()) == (None, None)


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_device_that_is_slower_or_faster_for_long_has_drifted_once(factor: float) -> None:
    of = drift()
    windows(of, NUM_WINDOWS - 1, STEP_S * factor)
    assert of.take() is None, "not yet"
    windows(of, 2, STEP_S * factor)
    assert of.take() == pytest.approx(factor)
    assert of.profile.layers["full_attention"].rows[0] == pytest.approx((1, LAYER_S * factor))
    windows(of, 2 * NUM_WINDOWS, STEP_S * factor)
    assert of.take() is None, "that is its profile now"


def test_one_step_that_hung_and_a_little_more_time_are_no_drift() -> None:
    of = drift()
    windows(of, NUM_WINDOWS, STEP_S)
    of.add(PLAN, 100.0)
    windows(of, NUM_WINDOWS - 1, STEP_S)
    assert of.take() is None
    windows(of, 2 * NUM_WINDOWS, STEP_S * (DRIFT - 0.1))
    assert of.take() is None


def test_steps_that_move_kv_or_compute_nothing_do_not_count() -> None:
    of = drift()
    for _ in range(NUM_WINDOWS * WINDOW_STEPS):
        of.add(StepPlan(0, (), DECODES, (), 0, (Move(1, 1, is_out=True),)), 100.0)
        of.add(StepPlan(0, (), (), ()), 100.0)
    assert of.ratio == 1.0


def test_steps_that_wait_for_streamed_layers_do_not_count() -> None:
    of = drift(streams=True)
    windows(of, 2 * NUM_WINDOWS, 10 * STEP_S)
    assert of.take() is None


def test_a_plan_is_the_step_that_the_planner_knows() -> None:
    rows = (Row(1, 9, 3, (5,), (), wants=True, drafts=(7, 8)), Row(2, 4, 3, (), (0,), wants=False))
    kind = step_kind(StepPlan(0, (), rows, ()))
    assert (kind.decodes, kind.decode_context) == (3, 10 + 11 + 12)
    assert (kind.prefill, kind.prefill_context) == (3, 5 + 6 + 7)
    assert compute_s(device("a:0"), {"full_attention": 2}, kind, is_tail=False) == pytest.approx(
        2 * LAYER_S
    )


def test_the_planner_knows_as_many_rows_as_the_scheduler_packs() -> None:
    # Given a job that copies its prompt, beside one that does not
    pipeline = Pipeline(config(prompt_lookup=16))
    pipeline.add(request("a", repeats=True))
    pipeline.add(request("b"))
    num_drafts = 0

    # Then each of its steps is to the planner what every stage computes
    for _ in range(100):
        if (plan := pipeline.schedule()) is None:
            break
        kind = step_kind(plan)
        assert kind.decodes + kind.prefill == plan.num_tokens
        num_drafts += plan.num_drafts
        pipeline.deliver()
    assert num_drafts > 0
