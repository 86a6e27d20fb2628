"""Layers to stages and stages to cores on one machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.standalone.placement import (
    core_groups,
    count_layers,
    is_gpu_unused,
    is_preferred,
    num_pipelines,
    on_all_cores,
    places,
    replaced,
)
from services.standalone.settings import CLERK, StandaloneSettings
from shardline.base.errors import Invalid
from shardline_costs import DeviceProfile, Workload
from shardline_fleet.planner import make_plans
from tests.gguf_models import write_gguf
from tests.models import save_model
from tests.unit.fleet.planner.fleets import device, model


def test_two_stages_on_two_cores_have_one_each() -> None:
    first, second = places(StandaloneSettings(stages=2), 8, [0, 1])
    assert (first.name, first.layers_text, first.device, first.shared) == (
        "stage-0",
        "0-3",
        "cpu:0",
        False,
    )
    assert (second.name, second.layers_text, second.device, second.shared) == (
        "stage-1",
        "4-7",
        "cpu:1",
        False,
    )


@pytest.mark.parametrize(("num_layers", "cores"), [(8, [0]), (1, [0, 1])])
def test_one_core_or_layer_is_one_stage_unless_more_are_asked_for(
    num_layers: int, cores: list[int]
) -> None:
    (stage,) = places(StandaloneSettings(), num_layers, cores)
    assert (len(stage.layers or ()), stage.shared) == (num_layers, False)


def test_ranks_divide_the_cores_of_one_stage_if_nobody_says_more() -> None:
    (stage,) = places(StandaloneSettings(tp=2), 8, [0, 1, 2, 3])
    assert (stage.layers_text, stage.device) == ("0-7", "cpu:0-3")


def test_two_replicas_on_two_cores_share_and_have_names_of_their_own() -> None:
    stages = places(StandaloneSettings(stages=2, replicas=2), 8, [0, 1])
    assert [stage.name for stage in stages] == ["stage-0", "stage-1", "stage-0.1", "stage-1.1"]
    assert all(stage.shared for stage in stages)


def test_each_stage_gets_an_equal_share_of_more_cores() -> None:
    assert [stage.device for stage in places(StandaloneSettings(stages=2), 8, [0, 1, 2, 5])] == [
        "cpu:0-1",
        "cpu:2,5",
    ]


def test_free_cores_are_placed_before_those_of_another_stack() -> None:
    stages = places(
        StandaloneSettings(stages=2, stage_cores=1), 8, [0, 1, 2], taken=frozenset({0, 1})
    )
    assert [(stage.device, stage.shared) for stage in stages] == [("cpu:2", False), ("cpu:0", True)]


def test_a_split_by_hand_is_obeyed() -> None:
    stages = places(StandaloneSettings(stages=2, split="0-5,6-7"), 8, [0, 1])
    assert [stage.layers_text for stage in stages] == ["0-5", "6-7"]


def test_named_devices_are_the_stages_and_those_named_twice_are_shared() -> None:
    stages = places(StandaloneSettings(devices="cuda:1 cpu:0-1 cpu:1,3"), 8, [0, 1, 2, 3])
    assert [(stage.device, stage.cores, stage.shared) for stage in stages] == [
        ("cuda:1", (), False),
        ("cpu:0-1", (0, 1), True),
        ("cpu:1,3", (1, 3), True),
    ]
    assert [stage.layers_text for stage in stages] == ["0-2", "3-5", "6-7"]
    replicas = places(StandaloneSettings(devices="cuda cuda cpu:0 cpu:1", replicas=2), 8, [0, 1])
    assert [(stage.replica, stage.place, stage.shared) for stage in replicas] == [
        (0, 0, False),
        (0, 1, False),
        (1, 0, False),
        (1, 1, False),
    ]


def test_a_fleet_has_the_named_devices_too() -> None:
    stages = places(StandaloneSettings(devices="mps mps", workers=2), 8, [0])
    assert [(stage.name, stage.device, stage.shared) for stage in stages] == [
        ("worker-0", "mps", True),
        ("worker-1", "mps", True),
    ]


def placed(
    settings: StandaloneSettings, profiles: list[DeviceProfile], num_stages: int | None
) -> list[str]:
    """The stages of the best plan over these devices, as people read them."""
    stages = places(settings, 12, [0, 1, 2, 3])
    plan = make_plans(
        model(), profiles, Workload(), num_stages=num_stages, replicas=num_stages and 1
    ).best
    found = replaced(stages, plan, [profile.device for profile in profiles])
    assert num_pipelines(found) == plan.replicas * len(stages) // len(profiles)
    return [f"{stage.name} {stage.layers_text} {stage.device}" for stage in found]


def test_a_plan_of_whole_models_makes_each_device_a_pipeline() -> None:
    devices = [device(name, frame_s=0.001) for name in ("cpu:0-1", "cpu:2-3")]
    assert placed(StandaloneSettings(stages=2), devices, None) == [
        "stage-0 0-11 cpu:0-1",
        "stage-0.1 0-11 cpu:2-3",
    ]


def test_every_replica_follows_the_plan_of_the_first_one() -> None:
    devices = [device("cpu:0"), device("cpu:1", slower=2.0)]
    assert placed(StandaloneSettings(stages=2, replicas=2), devices, 2) == [
        "stage-0 0-7 cpu:0",
        "stage-1 8-11 cpu:1",
        "stage-0.1 0-7 cpu:2",
        "stage-1.1 8-11 cpu:3",
    ]


def test_one_stage_has_the_cores_and_layers_of_all_shares() -> None:
    shares = places(StandaloneSettings(), 12, [0, 1, 4, 5])
    whole = on_all_cores(shares)
    assert (whole.name, whole.layers_text, whole.device) == ("stage-0", "0-11", "cpu:0-1,4-5")
    assert not whole.shared


@pytest.mark.parametrize(
    ("slower", "expected"),
    [(0.5, True), (0.6, True), (0.7, False)],
    ids=["as many tokens", "a little fewer tokens, sooner for one", "fewer tokens"],
)
def test_all_cores_are_one_stage_where_batches_lose_little(slower: float, expected: bool) -> None:
    half = [device("cpu:0", frame_s=0.0), device("cpu:1", frame_s=0.0)]
    shares, whole = (
        make_plans(model(), profiles, Workload()).best
        for profiles in (half, [device("cpu:0-1", slower=slower)])
    )
    assert is_preferred(whole, shares) is expected


def test_all_cores_that_serve_one_no_sooner_must_give_as_many_tokens() -> None:
    shares = make_plans(model(), [device("cpu:0"), device("cpu:1")], Workload()).best
    slower = msgspec.structs.replace(
        shares, tokens_per_s=0.99 * shares.tokens_per_s, request_s=1.1 * shares.request_s
    )
    assert is_preferred(shares, shares)
    assert not is_preferred(slower, shares)


@pytest.mark.parametrize(
    "field", ["devices", "replicas", "stages", "split", "workers", "stage_cores"]
)
def test_whoever_names_a_part_of_the_placement_keeps_the_rest_of_it(field: str) -> None:
    given: Any = {field: "even" if field in {"devices", "split"} else 1}
    assert StandaloneSettings(**given).is_placed
    assert not StandaloneSettings().is_placed


@pytest.mark.parametrize(
    ("devices", "file", "is_unused"),
    [
        (None, "nvidia0", True),
        (None, "kfd", True),
        (None, "nvidiactl", False),
        ("cpu:0", "nvidia0", False),
    ],
)
def test_a_gpu_without_a_stage_is_noticed(
    devices: str | None, file: str, is_unused: bool, tmp_path: Path
) -> None:
    (tmp_path / file).touch()
    assert is_gpu_unused(StandaloneSettings(devices=devices), tmp_path) == is_unused


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (StandaloneSettings(stages=9), "SHARDLINE_STAGES"),
        (StandaloneSettings(stages=3, split="0-5,6-7"), "SHARDLINE_SPLIT"),
        (StandaloneSettings(stage_cores=3), "SHARDLINE_STAGE_CORES"),
        (StandaloneSettings(devices="cuda:0 cpu:0", stages=3), "SHARDLINE_DEVICES"),
        (StandaloneSettings(devices="cuda:0 cpu:0", workers=1), "SHARDLINE_DEVICES"),
        (StandaloneSettings(devices="cpu:x cpu:0"), "SHARDLINE_DEVICE"),
    ],
)
def test_an_impossible_placement_names_the_setting(
    settings: StandaloneSettings, field: str
) -> None:
    with pytest.raises(Invalid, match=field):
        places(settings, 8, [0, 1])


@given(st.integers(1, 40), st.integers(1, 16))
def test_groups_overlap_only_if_there_are_too_few_cores(num: int, have: int) -> None:
    groups = core_groups(num, None, list(range(have)), frozenset())
    used = [core for group in groups for core in group]
    assert len(groups) == num
    assert (len(used) == len(set(used))) == (num <= have)
    assert len({len(group) for group in groups}) == 1


@pytest.mark.parametrize(
    "config", [{"num_hidden_layers": 5}, {"n_layer": 5}, {"text_config": {"num_hidden_layers": 5}}]
)
def test_the_layers_of_a_models_config_are_counted(config: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert count_layers(StandaloneSettings(model=str(tmp_path))) == 5


def test_a_folder_without_a_model_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="SHARDLINE_MODEL"):
        count_layers(StandaloneSettings(model=str(tmp_path)))


def test_the_layers_of_a_gguf_file_are_counted_and_its_name_is_the_models(tmp_path: Path) -> None:
    path = write_gguf(save_model(tmp_path), tmp_path / "tiny.gguf")
    settings = StandaloneSettings(model=str(path))
    assert (count_layers(settings), settings.name) == (4, "tiny")
    with pytest.raises(Invalid, match=r"lacks gone\.gguf"):
        count_layers(StandaloneSettings(model=str(tmp_path / "gone.gguf")))


def test_the_default_model_is_clerk_else_its_folder_or_id(tmp_path: Path) -> None:
    assert StandaloneSettings(model=str(CLERK), model_name="other").name == "other"
    assert StandaloneSettings(model=str(tmp_path)).name == tmp_path.name
    assert StandaloneSettings(model="some/model").name == "some/model"
