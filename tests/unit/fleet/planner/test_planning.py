"""Plans give each device what suits it, within its memory, and say what that gives."""

from __future__ import annotations

import random
from itertools import pairwise, permutations
from typing import Any

import msgspec
import pytest

from shardline.base.errors import Invalid
from shardline_costs import DeviceProfile, Goal, Plans, Workload
from shardline_costs.prediction import Predictor, StageAssignment
from shardline_fleet.planner import make_plans
from tests.unit.fleet.planner.fleets import LAYER_S, device, model

LOAD = Workload(prompt=64, output=64, concurrency=8)
NEAR = 0.01
"""Hops take time too."""
KV_BYTES = LOAD.kv_tokens * 4
"""Of each number that a token keeps."""


def plans(*profiles: DeviceProfile, **how: Any) -> Plans:
    return make_plans(model(), profiles, LOAD, **how)


def sizes(found: Plans) -> list[int]:
    return [stage.stop - stage.first for stage in found.best.pipelines[0].stages]


def names(found: Plans) -> list[str]:
    return [stage.devices[0].device for stage in found.best.pipelines[0].stages]


def test_a_device_half_as_fast_gets_half_as_many_layers() -> None:
    found = plans(device("a:0"), device("b:0", slower=2.0), num_stages=2)
    assert dict(zip(names(found), sizes(found), strict=True)) == {"a:0": 8, "b:0": 4}
    assert found.even is not None
    assert found.cost(found.even) == pytest.approx(12 / 8, rel=NEAR)


def test_the_tail_holds_fewer_layers_for_its_output_layer() -> None:
    found = plans(
        device("a:0", tail_s=4 * LAYER_S), device("a:1", tail_s=4 * LAYER_S), num_stages=2
    )
    assert sizes(found) == [8, 4]


@pytest.mark.parametrize("seed", [0, 1, 28, 51, 197])
def test_two_unlike_devices_get_the_best_of_all_splits_in_both_orders(seed: int) -> None:
    # Given devices on whose output layers decodes wait and prompts do not: no stage is the slowest
    # in every step
    chance = random.Random(seed)
    profiles = [
        device(
            name,
            slower=chance.uniform(1, 12),
            tail_s=chance.uniform(0, 40) * LAYER_S,
            tail_prefill_row_s=-chance.uniform(0, 1) * LAYER_S / 64,
        )
        for name in ("a:0", "b:0")
    ]
    load = Workload(prompt=160, output=64, concurrency=32, at_once=True)
    costs = model()
    predictor = Predictor(model(), load)
    tried = [
        predictor.predict(
            [StageAssignment((head,), 0, bound), StageAssignment((tail,), bound, len(costs.layers))]
        ).tokens_per_s
        for head, tail in permutations(profiles)
        for bound in range(1, len(costs.layers))
    ]

    # When they are planned, then no split is predicted to be faster
    assert make_plans(
        costs, profiles, load, num_stages=2, replicas=1
    ).best.tokens_per_s == pytest.approx(max(tried))


def test_a_device_that_slows_the_others_down_is_left_out() -> None:
    found = plans(device("a:0"), device("b:0", slower=30.0), replicas=1)
    assert names(found) == ["a:0"]


def test_equal_devices_that_hold_the_model_become_replicas() -> None:
    found = make_plans(
        model(), [device("a:0"), device("a:1")], Workload(prompt=64, output=64, concurrency=512)
    )
    assert found.best.replicas == 2
    assert [name.device for name in found.best.pipelines[0].stages[0].devices] == ["a:0", "a:1"]


def test_memory_bounds_what_a_fast_device_gets() -> None:
    layer = model().layers[0].num_weights * 4
    embedding = model().embedding_weights * 4
    kv = model().layers[0].kv_numbers * KV_BYTES
    small = device(
        "fast:0", slower=0.1, memory_bytes=int(1.05 * (3.5 * layer + embedding)) + 3 * kv
    )
    found = plans(small, device("slow:0"), num_stages=2)
    assert dict(zip(names(found), sizes(found), strict=True)) == {"fast:0": 3, "slow:0": 9}
    assert found.even is None


def test_devices_of_one_host_share_its_memory() -> None:
    whole = int(1.5 * model().num_weights * 4) + 12 * model().layers[0].kv_numbers * KV_BYTES
    found = plans(
        *(device(f"cpu:{core}", memory_bytes=whole, host_memory="here") for core in range(2))
    )
    assert len(found.best.pipelines[0].stages) == 2, (
        "the host's memory does not hold the model twice"
    )


def test_what_fits_nowhere_is_refused_with_its_size() -> None:
    with pytest.raises(
        Invalid, match=r"2 devices do not hold the model \(\d+ MiB\) and the KV of 1,024 tokens"
    ):
        plans(device("a:0", memory_bytes=1 << 18), device("a:1", memory_bytes=1 << 18))


def test_stages_of_one_pipeline_have_activations_of_one_dtype() -> None:
    profiles = [
        device("a:0", dtype="float32"),
        device("b:0", dtype="bfloat16"),
        device("c:0", dtype="int8"),
    ]
    found = plans(*profiles, num_stages=2)
    assert {stage.dtype for stage in found.best.pipelines[0].stages} == {"bfloat16", "int8"}


def test_a_device_is_used_with_the_ranks_that_are_faster_there() -> None:
    ways = [device("a:0"), device("a:0", ranks=2, slower=0.5)]
    found = plans(*ways, device("b:0"), device("b:0", ranks=2, slower=2), num_stages=2)
    assert dict(
        zip(names(found), [stage.ranks for stage in found.best.pipelines[0].stages], strict=True)
    ) == {
        "a:0": 2,
        "b:0": 1,
    }


def test_a_device_is_used_with_the_dtype_that_is_faster_there() -> None:
    ways = [device("a:0", dtype="bfloat16"), device("a:0", dtype="int8", slower=0.5)]
    found = plans(*ways, device("b:0", dtype="bfloat16"), num_stages=2)
    assert dict(
        zip(names(found), [stage.dtype for stage in found.best.pipelines[0].stages], strict=True)
    ) == {
        "a:0": "int8",
        "b:0": "bfloat16",
    }


def test_a_request_alone_goes_through_the_fast_device_only() -> None:
    found = plans(device("a:0"), device("b:0", slower=1.5), goal=Goal.LATENCY, replicas=1)
    assert names(found) == ["a:0"]
    assert found.best.token_s == pytest.approx(12 * LAYER_S, rel=NEAR)


def test_the_next_plans_are_worse_and_say_by_how_much() -> None:
    found = plans(device("a:0"), device("b:0", slower=2.0), num_stages=2)
    assert len(found.others) == 3
    costs = [1.0, *map(found.cost, found.others)]
    assert all(one <= other for one, other in pairwise(costs))


def test_kinds_of_layers_have_their_own_times() -> None:
    kinds = ("sliding_attention", "full_attention")
    profiles = [device(f"a:{number}", kinds=kinds) for number in range(2)]
    slow = msgspec.structs.replace(profiles[0].layers["full_attention"], rows=((1, 9 * LAYER_S),))
    profiles = [
        msgspec.structs.replace(each, layers={**each.layers, "full_attention": slow})
        for each in profiles
    ]
    found = make_plans(model(5, kinds=kinds), profiles, LOAD, num_stages=2)
    assert sizes(found) in ([2, 3], [3, 2]), "each stage has one of the two slow layers"


@pytest.mark.parametrize("goal", list(Goal))
def test_a_model_of_one_layer_is_planned(goal: Goal) -> None:
    assert sizes(make_plans(model(1), [device("a:0")], LOAD, goal)) == [1]


def test_kinds_of_layers_that_take_no_time_are_planned() -> None:
    free = device("a:0", kinds=("sliding_attention", "full_attention"))
    none = msgspec.structs.replace(free.layers["full_attention"], rows=((64, 0.0), (128, LAYER_S)))
    free = msgspec.structs.replace(free, layers={**free.layers, "full_attention": none})
    found = make_plans(
        model(6, kinds=("sliding_attention", "full_attention")), [free], LOAD, replicas=1
    )
    assert sizes(found) == [6]


def test_a_profile_of_another_model_is_refused_by_the_kind_that_it_lacks() -> None:
    with pytest.raises(Invalid, match="a:0 has no times of full_attention"):
        plans(device("a:0", kinds=("linear_attention",)))


@pytest.mark.parametrize("unlike", [0.0, 0.1])
def test_each_of_64_devices_gets_its_share_of_200_layers(unlike: float) -> None:
    """All stages are busy for nearly as long as if layers could be cut anywhere: of four speeds, or
    no two alike."""
    slower = {
        f"{'abcd'[number % 4]}:{number}": 1 + number % 4 + unlike * number for number in range(64)
    }
    profiles = [device(name, slower=times) for name, times in slower.items()]
    found = make_plans(model(200), profiles, Workload(concurrency=512), replicas=1, num_stages=32)
    busiest = max(found.best.pipelines[0].stages, key=lambda stage: stage.busy_s)
    layer_s = busiest.busy_s / (busiest.stop - busiest.first) / slower[busiest.devices[0].device]
    speed = sum(sorted((1 / times for times in slower.values()), reverse=True)[:32])
    assert busiest.busy_s < 1.25 * 200 * layer_s / speed


def test_weights_that_no_memory_holds_are_read_in_each_step_at_the_disks_rate() -> None:
    small: dict[str, Any] = {"memory_bytes": 5_500_000}
    with pytest.raises(Invalid):
        plans(device("a:0", **small))

    slow, fast = (
        plans(device("a:0", **small, stream_bytes_per_s=rate)).best for rate in (1e6, 2e6)
    )

    (stage,) = slow.pipelines[0].stages
    assert stage.layers == "0-11"
    assert 0 < stage.streamed_bytes < stage.weight_bytes
    assert fast.tokens_per_s == pytest.approx(2 * slow.tokens_per_s, rel=NEAR)
    held = plans(device("a:0", stream_bytes_per_s=1e6)).best
    assert held.pipelines[0].stages[0].streamed_bytes == 0
    assert held.tokens_per_s > fast.tokens_per_s
