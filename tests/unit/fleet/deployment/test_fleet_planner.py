"""Workers come, go and return: who gets which stage, and when all get new ones."""

from __future__ import annotations

from collections import Counter

import pytest

from shardline.base.errors import Invalid
from shardline_costs import DeviceProfile, Workload
from shardline_fleet.deployment.fleet_planner import Deployment, FleetPlanner
from tests.unit.fleet.planner.fleets import device, model

LOAD = Workload(prompt=64, output=64, concurrency=512)
SMALL = 4 << 20
"""Bytes that hold about half of the model and its KV."""


def fleet(*profiles: DeviceProfile) -> FleetPlanner:
    return FleetPlanner(
        model(), {profile.device: profile for profile in profiles}, Workload(concurrency=1)
    )


def small(*names: str, slower: float = 1.0) -> list[DeviceProfile]:
    """Devices none of which holds the model."""
    return [device(name, slower=slower, memory_bytes=SMALL) for name in names]


def planned(
    planner: FleetPlanner, now: Deployment | None = None, *, may_improve: bool = False
) -> Deployment:
    found = planner.replan(now, may_improve=may_improve)
    assert found is not None
    return found


def test_the_first_plan_gives_every_worker_a_stage() -> None:
    first = planned(fleet(*small("a:0", "a:1", "a:2")))
    assert set(first.stages) == {"a:0", "a:1", "a:2"}
    assert first.split[-1][1] == 12
    assert set(first.stages.values()) == set(range(len(first.split)))


def test_nothing_changes_while_all_are_here() -> None:
    workers = small("a:0", "a:1")
    assert fleet(*workers).replan(planned(fleet(*workers)), may_improve=True) is None


def test_a_worker_that_returns_finds_its_stage_again() -> None:
    workers = small("a:0", "a:1", "a:2", "a:3")
    now = Deployment(split=((0, 6), (6, 12)), stages={"a:0": 0, "a:1": 1, "a:2": 0, "a:3": 1})
    assert fleet(*workers[:3]).replan(now, may_improve=False) is None, "three still form a pipeline"


def test_a_new_worker_becomes_a_spare_of_the_stage_that_has_fewest() -> None:
    now = Deployment(split=((0, 6), (6, 12)), stages={"a:0": 0, "a:1": 1, "a:2": 0})
    then = planned(fleet(*small("a:0", "a:1", "a:2", "a:3")), now)
    assert (then.split, dict(then.stages)) == (now.split, {**now.stages, "a:3": 1})


def test_a_new_cut_must_pay_and_waits_for_its_time() -> None:
    now = Deployment(split=((0, 6), (6, 12)), stages={"a:0": 0, "a:1": 1})
    much = fleet(*small("a:0", "a:1"), device("b:0", slower=0.1, memory_bytes=SMALL))
    assert planned(much, now).split == now.split, "not before its time"
    assert planned(much, now, may_improve=True).split != now.split
    little = fleet(*small("a:0", "a:1"), device("b:0", slower=50.0, memory_bytes=SMALL))
    assert planned(little, now, may_improve=True).split == now.split


def test_a_fleet_that_misses_a_stage_is_cut_anew_at_once() -> None:
    now = Deployment(split=((0, 4), (4, 8), (8, 12)), stages={"a:0": 0, "a:1": 1, "a:2": 2})
    then = planned(fleet(*small("a:0", "a:2")), now)
    assert set(then.stages) == {"a:0", "a:2"}
    assert len(then.split) == 2


def test_workers_that_can_keep_their_layers_keep_them() -> None:
    workers = small("a:0", "a:1")
    split = planned(fleet(*workers)).split
    now = Deployment(split=split, stages={"a:1": 0, "gone": 1})
    assert dict(planned(fleet(*workers), now).stages) == {"a:1": 0, "a:0": 1}


def test_spares_get_only_what_their_memory_holds() -> None:
    now = Deployment(split=((0, 6), (6, 12)), stages={"a:0": 0, "a:1": 1})
    then = planned(fleet(*small("a:0", "a:1", "a:2"), device("tiny:0", memory_bytes=1 << 16)), now)
    assert "tiny:0" not in then.stages
    assert Counter(then.stages.values()) == {0: 2, 1: 1}


def test_too_few_workers_for_the_model_are_refused() -> None:
    with pytest.raises(Invalid, match="1 devices do not hold the model"):
        fleet(*small("a:0")).replan(None, may_improve=False)


@pytest.mark.parametrize("memory_bytes", [5 << 20, 13 << 19])
def test_a_device_that_has_drifted_gets_other_layers_however_small_its_memory(
    memory_bytes: int,
) -> None:
    """Also where the devices hold the KV of a part of the load only."""
    workers = {name: device(name, memory_bytes=memory_bytes) for name in ("a:0", "b:0")}
    planner = FleetPlanner(model(), workers, Workload())
    now = planned(planner)
    assert planner.replan(now, may_improve=True) is None
    slow = next(worker for worker, place in now.stages.items() if place == 0)
    drifted = FleetPlanner(model(), workers | {slow: workers[slow].scaled(3.0)}, Workload())
    then = planned(drifted, now, may_improve=True)
    sizes = {
        worker: then.split[place][1] - then.split[place][0] for worker, place in then.stages.items()
    }
    assert sizes[slow] < min(sizes[worker] for worker in sizes if worker != slow)
    assert drifted.replan(then, may_improve=True) is None


def test_replicas_of_unlike_devices_are_no_reason_for_the_same_plan_again() -> None:
    workers = {name: device(name) for name in ("a:0", "a:1")}
    now = planned(FleetPlanner(model(), workers, Workload()))
    assert set(now.stages.values()) == {0}
    drifted = FleetPlanner(model(), workers | {"a:0": workers["a:0"].scaled(3.0)}, Workload())
    assert drifted.replan(now, may_improve=True) is None


def test_a_slower_device_does_not_keep_its_layers_because_its_hardware_is_the_same() -> None:
    """The best plan exchanges the two: equal hardware, but one of them has drifted since the plan
    gave it more."""
    workers = {name: device(name, memory_bytes=13 << 19) for name in ("a:0", "a:1")}
    now = Deployment(split=((0, 5), (5, 12)), stages={"a:0": 0, "a:1": 1})
    drifted = FleetPlanner(model(), workers | {"a:1": workers["a:1"].scaled(2.0)}, Workload())
    then = planned(drifted, now, may_improve=True)
    sizes = {
        worker: then.split[place][1] - then.split[place][0] for worker, place in then.stages.items()
    }
    assert sizes["a:1"] < sizes["a:0"]


def unlike(*names: str) -> FleetPlanner:
    """Workers of which those named `large` hold the model with every request, and two others with
    some."""
    sizes = {name: 1 << 30 if name.startswith("large") else 13 << 19 for name in names}
    profiles = {
        name: device(name, memory_bytes=memory_bytes) for name, memory_bytes in sizes.items()
    }
    return FleetPlanner(model(), profiles, Workload())


def layers(deployment: Deployment) -> dict[str, tuple[int, int]]:
    return {worker: deployment.split[place] for worker, place in deployment.stages.items()}


def test_a_worker_that_holds_the_model_serves_beside_two_that_hold_it_together() -> None:
    planner = unlike("large:0", "a:0", "a:1")
    found = planned(planner)
    assert [len(places) for places in found.pipelines] == [1, 2]
    assert layers(found)["large:0"] == (0, 12)
    assert {layers(found)["a:0"], layers(found)["a:1"]} == {(0, 6), (6, 12)}
    assert str(found) == "0-11 + 0-5,6-11"
    assert planner.replan(found, may_improve=True) is None


@pytest.mark.parametrize("lost", ["large:0", "a:0", "a:1"])
def test_while_one_of_two_pipelines_is_whole_the_others_stay_as_they_are(lost: str) -> None:
    workers = {"large:0", "a:0", "a:1"}
    now = planned(unlike(*workers))
    assert unlike(*workers - {lost}).replan(now, may_improve=False) is None


def test_a_fleet_without_a_whole_pipeline_is_cut_anew_at_once() -> None:
    now = planned(unlike("large:0", "a:0", "a:1"))
    then = planned(unlike("a:0", "b:0", "b:1"), now)
    assert then.split != now.split
    assert all(then.workers(place) for place in range(len(then.split)))


def test_a_new_worker_takes_the_place_that_a_pipeline_misses() -> None:
    now = planned(unlike("large:0", "a:0", "a:1"))
    then = planned(unlike("large:0", "a:0", "a:2"), now)
    assert layers(then)["a:2"] == layers(now)["a:1"]
    assert then.split == now.split


def test_a_new_worker_that_holds_the_model_is_a_pipeline_of_its_own() -> None:
    now = planned(unlike("large:0", "a:0", "a:1"))
    then = planned(unlike("large:0", "large:1", "a:0", "a:1"), now)
    assert layers(then) == {**layers(now), "large:1": (0, 12)}


def test_workers_that_can_keep_their_layers_in_another_pipeline_keep_them() -> None:
    now = Deployment(split=((0, 6), (6, 12)), stages={"a:1": 0, "a:0": 1})
    then = planned(unlike("large:0", "a:0", "a:1"), now, may_improve=True)
    assert layers(then) == {"large:0": (0, 12), "a:1": (0, 6), "a:0": (6, 12)}


def test_the_speed_of_a_fleet_is_that_of_the_pipelines_that_its_workers_can_form() -> None:
    """When two that served are gone, and return, it is as fast as planned; nothing is gained by
    another cut."""
    planner = unlike("large:0", "a:0", "a:1")
    now = planned(planner)
    assert now.tokens_per_s is not None
    left = planned(unlike("large:0"), None)
    assert left.tokens_per_s is not None
    assert left.tokens_per_s < now.tokens_per_s
    assert planner.replan(now, may_improve=True) is None
