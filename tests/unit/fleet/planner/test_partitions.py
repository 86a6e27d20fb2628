"""Pipelines side by side, each with devices and a split of its own: as fast as any partition of the
devices."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random

import pytest

from shardline.base.errors import Invalid
from shardline_costs import DeviceProfile, Goal, Plan, Workload
from shardline_costs.prediction import StageAssignment
from shardline_fleet.planner import make_plans
from shardline_fleet.planner.boundaries import apart
from shardline_fleet.planner.load_sharing import LoadSharing
from shardline_fleet.planner.partitions import partitions
from tests.unit.fleet.planner.fleets import device, model

LOAD = Workload(prompt=64, output=64, concurrency=64)
LARGE = 1 << 30
SMALL = 5 << 20
"""Bytes that hold the model with every request, and those of which two devices hold it."""


def plan(*profiles: DeviceProfile, load: Workload = LOAD, goal: Goal = Goal.THROUGHPUT) -> Plan:
    return make_plans(model(24), profiles, load, goal).best


def fleet(random: Random, num: int) -> list[DeviceProfile]:
    """Devices of some kinds, of which not all hold the model."""
    speeds = {name: random.choice([1.0, 2.0, 5.0]) for name in "abcd"}
    sizes = {name: random.choice([SMALL, 2 * SMALL, LARGE]) for name in "abcd"}
    names = [random.choice("abcd") for _ in range(num)]
    return [
        device(f"{name}:{number}", slower=speeds[name], memory_bytes=sizes[name])
        for number, name in enumerate(names)
    ]


def every(devices: Sequence[DeviceProfile]) -> Iterator[list[list[DeviceProfile]]]:
    """Each way to put devices into parts."""
    if not devices:
        yield []
        return
    first, *rest = devices
    for parts in every(rest):
        yield [[first], *parts]
        for place, part in enumerate(parts):
            yield [*parts[:place], [first, *part], *parts[place + 1 :]]


def alone(
    devices: Sequence[DeviceProfile], concurrency: int, known: dict[tuple[str, ...], float]
) -> float:
    """Tokens/s of one pipeline over some of the devices; 0 if none holds so many requests."""
    key = (*(each.device for each in devices), str(concurrency))
    if key not in known:
        load = Workload(prompt=64, output=64, concurrency=concurrency)
        try:
            known[key] = make_plans(model(24), devices, load, replicas=1).best.tokens_per_s
        except Invalid:
            known[key] = 0.0
    return known[key]


def together(
    parts: Sequence[Sequence[DeviceProfile]], known: dict[tuple[str, ...], float]
) -> float:
    """Tokens/s of parts whose pipelines have equal shares, or as much as they hold."""
    sizes = range(1, LOAD.concurrency + 1)
    most = [
        bisect_left(sizes, True, key=lambda size: not alone(part, size, known)) for part in parts
    ]
    for level in sizes:
        shares = [min(level, each) for each in most]
        if sum(shares) >= LOAD.concurrency:
            speeds = [
                alone(part, share, known)
                for part, share in zip(parts, shares, strict=True)
                if share
            ]
            return sum(speeds) * LOAD.concurrency / sum(shares)
    return 0.0


@pytest.mark.parametrize("seed", range(16))
def test_no_partition_of_a_small_fleet_is_faster(seed: int) -> None:
    devices = fleet(Random(seed), 4)
    known = dict[tuple[str, ...], float]()
    fastest = max(together(parts, known) for parts in every(devices))
    if not fastest:
        with pytest.raises(Invalid):
            plan(*devices)
        return
    found = plan(*devices)
    assert found.tokens_per_s == pytest.approx(fastest, rel=0.001)


@pytest.mark.parametrize("seed", range(8))
def test_steps_from_one_pipeline_on_come_near_the_best_partition(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = [*fleet(Random(seed), 5), device("e:0", memory_bytes=LARGE)]
    best = plan(*devices)
    monkeypatch.setattr("shardline_fleet.planner.partitions.FEW_DEVICES", 0)
    assert plan(*devices).tokens_per_s > 0.95 * best.tokens_per_s


def test_a_device_that_holds_the_model_works_beside_two_that_hold_it_together() -> None:
    found = plan(
        device("a:0", memory_bytes=LARGE),
        *(device(f"b:{place}", memory_bytes=SMALL) for place in range(2)),
    )
    assert [len(each.stages) for each in found.pipelines] == [1, 2]
    assert found.replicas == 2
    assert found.tokens_per_s == pytest.approx(sum(each.tokens_per_s for each in found.pipelines))
    assert found.kv_tokens == sum(each.kv_tokens for each in found.pipelines)
    assert found.request_s == found.pipelines[0].request_s, (
        "alone a request goes where it ends first"
    )


def test_a_pipeline_that_holds_fewer_requests_leaves_the_rest_to_the_others() -> None:
    found = plan(
        device("a:0", memory_bytes=LARGE),
        *(device(f"b:{place}", memory_bytes=SMALL) for place in range(2)),
    )
    large, small = (each.concurrency for each in found.pipelines)
    assert large > small
    assert large + small == LOAD.concurrency
    assert found.pipelines[1].kv_tokens < 128 * (small + 1)


def test_pipelines_that_hold_as_many_have_equal_shares() -> None:
    found = plan(device("a:0"), device("b:0", slower=1.5))
    assert [each.concurrency for each in found.pipelines] == [32, 32]


def test_requests_that_shares_round_up_to_do_not_count() -> None:
    one = Workload(prompt=64, output=64, concurrency=1)
    three = [device(f"a:{number}") for number in range(3)]
    assert plan(*three, load=one).tokens_per_s == pytest.approx(
        plan(three[0], load=one).tokens_per_s
    )


def test_for_the_latency_of_a_request_there_is_one_pipeline() -> None:
    assert len(plan(device("a:0"), device("b:0", slower=1.1), goal=Goal.LATENCY).pipelines) == 1


def test_devices_of_unlike_dtypes_serve_in_pipelines_of_their_own() -> None:
    found = plan(device("a:0", dtype="float32"), device("b:0", dtype="bfloat16"))
    assert sorted(each.stages[0].dtype for each in found.pipelines) == ["bfloat16", "float32"]


def halves(name: str, num_layers: int, **other: float) -> list[StageAssignment]:
    bounds = pairwise((0, num_layers // 2, num_layers))
    return [
        StageAssignment((device(f"{name}:{place}", **other),), *part)
        for place, part in enumerate(bounds)
    ]


def test_of_pipelines_with_a_boundary_in_common_the_slower_one_gets_another() -> None:
    """Else a head could take a stage of the other one: the wrong device, and one that the other
    cannot do without."""
    found = apart(
        LoadSharing(model(24), LOAD), [halves("slow", 24, slower=2.0), halves("fast", 24)]
    )
    assert found is not None
    assert [[stage.profile.hardware for stage in stages] for stages in found] == [
        ["fast"] * 2,
        ["slow"] * 2,
    ]
    assert [stages[1].first for stages in found] in ([12, 11], [12, 13])
    assert [stages[0].stop for stages in found] == [stages[1].first for stages in found]


def test_pipelines_of_more_stages_than_the_model_has_boundaries_are_not_side_by_side() -> None:
    assert (
        apart(LoadSharing(model(2), LOAD), [halves("slow", 2, slower=2.0), halves("fast", 2)])
        is None
    )


def test_every_partition_is_listed_once() -> None:
    listed = list(partitions((2, 1)))
    assert len(listed) == len(set(listed)) == 4
    assert len(list(partitions((1,) * 6))) == 203
