"""When steps pass through stages: one after the other on each, beside each other on several, later
over slow links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from shardline_costs import Link
from shardline_costs.prediction import Predictor, StageAssignment
from shardline_costs.workload import StepKind, Workload
from shardline_fleet.simulator.stage_chain import HEAD_ROW_S, HEAD_STEP_S, StageChain
from tests.unit.fleet.planner.fleets import LAYER_S, device, model

STEP = StepKind(count=1, decodes=8, decode_context=80)
HEAD_S = HEAD_STEP_S + 8 * HEAD_ROW_S


def chain(*bounds: int, **other: Any) -> StageChain:
    return StageChain(model(12), stages(*bounds, **other))


def stages(*bounds: int, **other: Any) -> Sequence[StageAssignment]:
    ends = [*bounds[1:], 12]
    return [
        StageAssignment((device(f"cpu:{place}", machine=str(place), **other),), first, stop)
        for place, (first, stop) in enumerate(zip(bounds, ends, strict=True))
    ]


def test_a_stage_computes_one_step_after_the_other() -> None:
    alone = chain(0)
    assert alone.send(0.0, STEP, 8) == pytest.approx((12 * LAYER_S + HEAD_S,) * 2)
    assert alone.send(0.0, STEP, 8) == pytest.approx((24 * LAYER_S + 2 * HEAD_S,) * 2)


def test_a_head_goes_on_while_later_stages_compute() -> None:
    two = chain(0, 6)
    head_s, answered_s = two.send(0.0, STEP, 8)
    assert head_s == pytest.approx(6 * LAYER_S + HEAD_S)
    assert answered_s == pytest.approx(12 * LAYER_S + HEAD_S, rel=1e-3)
    _, next_s = two.send(head_s, STEP, 8)
    assert next_s - answered_s == pytest.approx(6 * LAYER_S + HEAD_S, rel=1e-3)


def test_each_hop_takes_the_latency_of_its_link() -> None:
    far = {str(place): Link(latency_s=0.05, bytes_per_s=1e9) for place in range(2)}
    near = chain(0, 6)
    apart = chain(0, 6, links=far)
    assert apart.send(0.0, STEP, 8)[1] - near.send(0.0, STEP, 8)[1] == pytest.approx(0.1)


def test_a_slow_link_carries_one_frame_after_the_other() -> None:
    slow = {str(place): Link(latency_s=0.0, bytes_per_s=10_240) for place in range(2)}
    narrow = chain(0, 6, links=slow)
    frame_s = 8 * 64 * 4 / 10_240
    first_s = narrow.send(0.0, STEP, 8)[1]
    assert narrow.send(0.0, STEP, 8)[1] - first_s == pytest.approx(frame_s)


def test_what_links_take_more_counts_from_the_next_frame_on() -> None:
    two = chain(0, 6)
    before_s = two.send(0.0, STEP, 8)[1]
    two.slower_s = 0.2
    assert two.send(before_s, STEP, 8)[1] - before_s == pytest.approx(0.4 + before_s, rel=0.01)


def test_a_request_alone_takes_what_the_planner_predicts() -> None:
    load = Workload(prompt=64, output=3, concurrency=1)
    plan = Predictor(model(12), load).predict(stages(0, 6))
    two = chain(0, 6)
    decode = StepKind(count=1, decodes=1, decode_context=65)
    head_s = HEAD_STEP_S + HEAD_ROW_S
    assert two.send(0.0, decode, 1)[1] == pytest.approx(plan.token_s + head_s, rel=0.01)
