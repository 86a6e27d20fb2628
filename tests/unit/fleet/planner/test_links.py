"""Plans count what frames meet between machines: latency, bytes per second, and who is near
whom."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from shardline.contract.fleet.lanes import lanes_for
from shardline_costs import DeviceProfile, Goal, Link, PipelinePlan, Workload
from shardline_fleet.planner import make_plans
from shardline_fleet.planner.zones import zones
from tests.unit.fleet.planner.fleets import LAYER_S, device, model

LOAD = Workload(prompt=64, output=64, concurrency=8)
ALL = 4 * (1.05 * model().num_weights + 12 * model().layers[0].kv_numbers * LOAD.kv_tokens)
HALF = int(0.7 * ALL)
"""Bytes that do not hold the model and the KV of the load, but more than half of them."""
NEAR_S = 0.0001
FAR_S = 0.05


def at(
    machine: str, name: str, *, far_s: float = FAR_S, bytes_per_s: float = 1e9, **other: Any
) -> DeviceProfile:
    """A device of one of the machines x, y and z, between which the link is long."""
    links = {
        each: Link(latency_s=NEAR_S if each == machine else far_s, bytes_per_s=bytes_per_s)
        for each in ("x", "y", "z")
    }
    return device(name, machine=machine, host=machine, links=links, **other)


def best(
    *devices: DeviceProfile, goal: Goal = Goal.THROUGHPUT, load: Workload = LOAD
) -> PipelinePlan:
    return make_plans(model(), devices, load, goal, replicas=1).best.pipelines[0]


def machines(plan: PipelinePlan) -> list[str]:
    return [stage.devices[0].host for stage in plan.stages]


@pytest.mark.parametrize("far_s", [0.0, 0.004, 0.5])
def test_a_round_takes_all_stages_and_all_hops(far_s: float) -> None:
    """Each stage works for other steps while a frame is under way, up to a point."""
    plan = best(*(at(machine, f"a:{machine}", memory_bytes=HALF, far_s=far_s) for machine in "xy"))
    step_s = 6 * LAYER_S
    num_lanes = lanes_for(2, 2 * far_s, step_s)
    num_steps = num_lanes * LOAD.output
    interval_s = max(step_s, (2 * step_s + 2 * far_s) / num_lanes)
    assert plan.tokens_per_s == pytest.approx(
        LOAD.concurrency * LOAD.output / (num_steps * interval_s), rel=0.01
    )
    assert plan.token_s == pytest.approx(2 * step_s + 2 * far_s, rel=0.01)
    assert plan.stages[plan.bottleneck].busy_share == pytest.approx(step_s / interval_s, rel=0.01)


def test_a_link_that_is_narrow_holds_up_every_step() -> None:
    rows = LOAD.steps(2)[0].rows
    frame_s = 30 * LAYER_S
    narrow = rows * 64 * 4 / frame_s
    plan = best(
        *(
            at(machine, f"a:{machine}", memory_bytes=HALF, far_s=0.0, bytes_per_s=narrow)
            for machine in "xy"
        )
    )
    assert plan.tokens_per_s == pytest.approx(LOAD.concurrency / 2 / frame_s, rel=0.01)


def test_two_near_devices_beat_one_that_is_faster_but_far() -> None:
    near = [at("x", f"a:{number}", memory_bytes=HALF) for number in range(2)]
    far = at("y", "b:0", memory_bytes=HALF, slower=0.5)
    assert machines(best(*near, far)) == ["x", "x"]
    one, faster = (
        at(machine, f"{machine}:0", memory_bytes=HALF, slower=slower, far_s=NEAR_S)
        for machine, slower in (("x", 1.0), ("y", 0.5))
    )
    assert "y" in machines(best(near[0], one, faster)), "unless it is near as well"


@pytest.mark.parametrize("goal", list(Goal))
def test_frames_change_machines_as_seldom_as_they_can(goal: Goal) -> None:
    third = int(0.4 * ALL)
    devices = [
        at("xy"[number % 2], f"a:{number}", memory_bytes=third, far_s=0.01) for number in range(4)
    ]
    found = machines(best(*devices, goal=goal))
    assert sum(one != other for one, other in pairwise([*found, found[0]])) <= 2, (
        "the tail's answers go to the head"
    )


def test_sites_are_what_is_near_and_all_of_them_first() -> None:
    devices = [
        device(name, machine=name, links={other: Link(latency_s=latency_s, bytes_per_s=1e9)})
        for name, other, latency_s in [("x", "y", 0.0002), ("y", "z", 0.03), ("z", "x", 0.03)]
    ]
    found = [sorted(profile.machine for profile in zone) for zone in zones(devices)]
    assert found == [["x", "y", "z"], ["x", "y"], ["x"], ["y"], ["z"]]
    assert zones([device("a:0"), device("a:1")]) == [[device("a:0"), device("a:1")]], (
        "nothing is known of links"
    )
