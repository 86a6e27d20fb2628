"""Splits by hand: who gets which stage, that the plan's speed is reached, and what does not fit."""

from __future__ import annotations

import pytest

from shardline.base.errors import Invalid
from shardline_costs import DeviceProfile
from shardline_fleet.simulator.plan_book import PlanBook, SplitByHand
from tests.unit.fleet.planner.fleets import device, model
from tests.unit.fleet.simulator.test_simulation import LARGE, SMALL, server, simulated

LOAD = {"jobs": 200, "prompt": 64, "output": 32}


def profiles(num: int, **other: int) -> dict[str, DeviceProfile]:
    return {f"{place:05d}": device(f"{place:05d}", **other) for place in range(num)}


def test_the_planned_split_by_hand_is_as_fast_as_planned() -> None:
    planned = simulated(LARGE, {"l4": 2}, load=LOAD)
    (split,) = planned.fleet.plans
    assert simulated(LARGE, {"l4": 2}, load=LOAD, split=split) == planned


def test_stages_are_dealt_in_turns_and_who_is_left_over_is_a_spare() -> None:
    deployment = SplitByHand(model(12), "0-5,6-11").first(0, profiles(5))
    assert deployment.split == ((0, 6), (6, 12))
    assert [*deployment.stages.values()] == [0, 1, 0, 1, 0]


def test_who_is_lost_keeps_its_stage_and_who_joins_gets_one() -> None:
    plans: PlanBook = SplitByHand(model(12), "0-5,6-11")
    now = plans.first(0, profiles(2))
    assert plans.replan(0, profiles(1), now, may_improve=True) is None
    then = plans.replan(0, profiles(3), now, may_improve=False)
    assert then is not None
    assert [*then.stages.values()] == [0, 1, 0]


def test_a_lost_stage_of_a_split_by_hand_comes_back_with_its_layers() -> None:
    fault = {"at_s": 20.0, "lose": 0.5, "back_s": 25.0}
    found = simulated(
        SMALL, {"l4": 2}, load=server(1.0), faults=[fault], split="0-1,2-3", load_s=300.0
    )
    assert found.unfinished == 0
    assert 20.0 < found.held_up_s.p50 < 30.0


@pytest.mark.parametrize(
    ("split", "num", "memory_bytes", "said"),
    [
        ("0-5,6-10", 2, 1 << 30, "it ends at layer 10, the model has 0-11"),
        ("0-5,6-11", 1, 1 << 30, "1 devices for 2 stages"),
        ("0-0,1-11", 2, 1 << 22, "does not hold layers 1-11"),
    ],
)
def test_a_split_that_cannot_serve_is_refused(
    split: str, num: int, memory_bytes: int, said: str
) -> None:
    with pytest.raises(Invalid) as refused:
        SplitByHand(model(12), split).first(0, profiles(num, memory_bytes=memory_bytes))
    assert said in str(refused.value)
