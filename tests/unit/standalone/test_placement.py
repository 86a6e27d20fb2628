"""Layers to stages and stages to cores on one machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.standalone.placement import core_groups, count_layers, places
from services.standalone.settings import CLERK, StandaloneSettings
from shardline.errors import Invalid


def test_two_stages_on_two_cores_have_one_each() -> None:
    first, second = places(StandaloneSettings(stages=2), 8, [0, 1])
    assert (first.name, first.layers_text, first.device, first.shared) == ("stage-0", "0-3", "cpu:0", False)
    assert (second.name, second.layers_text, second.device, second.shared) == ("stage-1", "4-7", "cpu:1", False)


def test_two_replicas_on_two_cores_share_and_have_names_of_their_own() -> None:
    stages = places(StandaloneSettings(stages=2, replicas=2), 8, [0, 1])
    assert [stage.name for stage in stages] == ["stage-0", "stage-1", "stage-0.1", "stage-1.1"]
    assert all(stage.shared for stage in stages)


def test_each_stage_gets_an_equal_share_of_more_cores() -> None:
    assert [stage.device for stage in places(StandaloneSettings(stages=2), 8, [0, 1, 2, 5])] == ["cpu:0,1", "cpu:2,5"]


def test_free_cores_are_placed_before_those_of_another_stack() -> None:
    stages = places(StandaloneSettings(stages=2, stage_cores=1), 8, [0, 1, 2], taken=frozenset({0, 1}))
    assert [(stage.device, stage.shared) for stage in stages] == [("cpu:2", False), ("cpu:0", True)]


def test_a_split_by_hand_is_obeyed() -> None:
    stages = places(StandaloneSettings(stages=2, split="0-5,6-7"), 8, [0, 1])
    assert [stage.layers_text for stage in stages] == ["0-5", "6-7"]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (StandaloneSettings(stages=9), "SHARDLINE_STAGES"),
        (StandaloneSettings(stages=3, split="0-5,6-7"), "SHARDLINE_SPLIT"),
        (StandaloneSettings(stage_cores=3), "SHARDLINE_STAGE_CORES"),
    ],
)
def test_an_impossible_placement_names_the_setting(settings: StandaloneSettings, field: str) -> None:
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


def test_the_default_model_is_clerk_else_its_folder_or_id(tmp_path: Path) -> None:
    assert StandaloneSettings(model=str(CLERK), model_name="other").name == "other"
    assert StandaloneSettings(model=str(tmp_path)).name == tmp_path.name
    assert StandaloneSettings(model="some/model").name == "some/model"
