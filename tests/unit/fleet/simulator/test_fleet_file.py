"""Fleet files: what they say, and what is refused by its field, its limit and a remedy."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shardline.base.errors import Invalid
from shardline_fleet.simulator.fleet_file import Scenario, read_fleet, read_model
from shardline_fleet.simulator.sampled_fleet import SampledFleet
from tests.repository import REPOSITORY
from tests.unit.fleet.planner.fleets import device

MODEL = (
    "{num_hidden_layers: 4, hidden_size: 64, intermediate_size: 256, "
    "num_attention_heads: 4, vocab_size: 1000}"
)
STUDIES = sorted((REPOSITORY / "docs/capacity").glob("*.yaml"))


def written(folder: Path, text: str) -> Path:
    path = folder / "fleet.yaml"
    path.write_text(text)
    return path


def refusal(folder: Path, text: str) -> str:
    path = written(folder, text)
    with pytest.raises(Invalid) as refused:
        sampled(path)
    return str(refused.value)


def sampled(path: Path) -> SampledFleet:
    fleet = read_fleet(path)
    return SampledFleet.of(fleet, read_model(fleet, path.parent), path.parent)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_files_of_the_studies_are_fleets(path: Path) -> None:
    assert all(kind.profiles for kind in sampled(path).kinds)


def test_a_small_file_has_defaults(tmp_path: Path) -> None:
    fleet = read_fleet(written(tmp_path, f"model: {MODEL}\ncells: [{{devices: {{l4: 2}}}}]"))
    assert fleet.load.scenario is Scenario.OFFLINE
    assert fleet.num_devices == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"model: {MODEL}", "missing required field `cells`"),
        (f"model: {MODEL}\ncells: []", "cells: Expected `array` of length >= 1"),
        (
            f"model: {MODEL}\ncells: [{{devices: {{l4: -1}}}}]",
            "cells[0].devices[...]: Expected `int` >= 1",
        ),
        (
            f"model: {MODEL}\ncells: [{{devices: {{l4: 1}}, size: 3}}]",
            "contains unknown field `size`",
        ),
        (
            f"model: {MODEL}\ncells: [{{devices: {{vax: 1}}}}]",
            "cells[0].devices: no datasheet of 'vax'. Use one of b200",
        ),
        (f"model: {MODEL}\ncells: [{{devices: {{gone.json: 1}}}}]", "gone.json cannot be read"),
        ("model: nowhere\ncells: [{devices: {l4: 1}}]", "model: "),
        (
            f"model: {MODEL}\ncells: [{{devices: {{l4: 1}}}}]\nfaults: [{{at_s: 1}}]",
            "exactly one is needed",
        ),
        (
            f"model: {MODEL}\ncells: [{{devices: {{l4: 1}}}}]\nload: {{spread: 1}}",
            "load.spread: Expected `float` < 1.0",
        ),
        (
            f"model: {MODEL}\ncells: [{{devices: {{l4: 1}}}}]\nfaults: [{{at_s: 1, slow: 0.5}}]",
            "latency_ms",
        ),
        ("model: [", "no YAML"),
    ],
)
def test_what_cannot_be_simulated_is_refused(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(tmp_path, text)


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_bytes(msgspec.json.encode(device("other:0")))
    text = f"model: {MODEL}\ncells: [{{devices: {{other.json: 1}}}}]"
    assert "other.json is a profile of another model" in refusal(tmp_path, text)


def test_of_several_profiles_in_a_file_the_dtype_takes_one(tmp_path: Path) -> None:
    text = f"model: {MODEL}\ncells: [{{devices: {{own.json: 1}}}}]"
    model = read_model(read_fleet(written(tmp_path, text)), tmp_path)
    dtypes = "bfloat16", "int8"
    found = [device("own:0", dtype=dtype, model=model.shapes_id) for dtype in dtypes]
    (tmp_path / "own.json").write_bytes(msgspec.json.encode(found))
    assert "own.json has 2 profiles to take (its dtypes: bfloat16, int8)" in refusal(tmp_path, text)
    assert "own.json has 0 profiles to take" in refusal(tmp_path, f"{text}\ndtype: float16")
    (kind,) = sampled(written(tmp_path, f"{text}\ndtype: int8")).kinds
    assert [profile.dtype for profile in kind.profiles.values()] == ["int8"]


def test_a_measured_profile_stands_for_its_device(tmp_path: Path) -> None:
    fleet = read_fleet(
        written(tmp_path, f"model: {MODEL}\ncells: [{{devices: {{own.json: 2}}, per_machine: 1}}]")
    )
    model = read_model(fleet, tmp_path)
    (tmp_path / "own.json").write_bytes(msgspec.json.encode(device("own:0", model=model.shapes_id)))
    (kind,) = SampledFleet.of(fleet, model, tmp_path).kinds
    first, second = kind.profiles.values()
    assert first.layers == device("own:0").layers
    assert first.link(second).latency_s == 50e-6


def test_of_many_cells_some_are_simulated_in_proportion(tmp_path: Path) -> None:
    cells = "[{devices: {l4: 2}, count: 300}, {devices: {t4: 2}, count: 100}]"
    some = sampled(written(tmp_path, f"model: {MODEL}\ncells: {cells}\nsample: 8"))
    assert [kind.num_simulated for kind in some.kinds] == [6, 2]
    assert some.share == 8 / 400
