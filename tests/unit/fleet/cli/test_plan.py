"""`shardline plan`: what a person sees, what a program reads, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from shardline.cli.commands import cli
from shardline_costs import ModelCosts
from tests.unit.fleet.planner.fleets import device

CONFIG = {
    "num_hidden_layers": 12,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def profiles(tmp_path: Path, model: Path) -> Path:
    """A cache with profiles of two unlike devices, and of a device with another model."""
    folder = tmp_path / "profiles"
    own = ModelCosts.read(model).shapes_id
    folder.mkdir()
    for found in (
        device("fast:0", model=own),
        device("slow:0", slower=2.0, model=own),
        device("other:0"),
    ):
        (folder / f"{found.device}.json").write_bytes(msgspec.json.encode(found))
    return folder


def plan(model: Path, *arguments: str | Path | int, status: int = 0) -> str:
    done = CliRunner().invoke(cli, ["plan", "--model", str(model), *map(str, arguments)])
    assert done.exit_code == status, done.output
    return done.output


def test_a_person_sees_stages_predictions_and_the_next_plans(model: Path, profiles: Path) -> None:
    shown = plan(model, "--cache-dir", profiles.parent, "--stages", 2)
    assert "best for throughput of 64 x 512 tokens in, 128 out: 2 stages" in shown
    assert "fast:0 on host" in shown
    assert [line.split()[0] for line in shown.splitlines()[-5:]] == ["1.", "2.", "3.", "4.", "even"]
    assert "other:0" not in shown


def test_pipelines_side_by_side_are_drawn_one_after_the_other(model: Path, profiles: Path) -> None:
    shown = plan(model, "--cache-dir", profiles.parent)
    assert "128 out: 1 stage + 1 stage" in shown
    assert shown.count("32 requests at a time in each replica") == 2
    assert "fast:0 +" in shown


def test_a_program_reads_the_same(model: Path, profiles: Path) -> None:
    read = json.loads(plan(model, "--devices", profiles, "--stages", 2, "--json"))
    sizes = {
        stage["devices"][0]["device"]: stage["stop"] - stage["first"]
        for stage in read["best"]["pipelines"][0]["stages"]
    }
    assert sizes == {"fast:0": 8, "slow:0": 4}
    assert read["goal"] == "throughput"


def test_plans_are_compared_by_what_their_devices_cost_an_hour(model: Path, profiles: Path) -> None:
    priced = ("--devices", profiles, "--hour-cost", "fast:0=3", "--hour-cost", "slow:0=0.5")
    read = json.loads(plan(model, *priced, "--json"))
    plans = [read["best"], *read["others"]]
    for each, cost in zip(plans, read["cost_per_million"], strict=True):
        names = [
            name["device"]
            for one in each["pipelines"]
            for stage in one["stages"]
            for name in stage["devices"]
        ]
        per_hour = sum({"fast:0": 3.0, "slow:0": 0.5}[name] for name in names)
        assert cost == pytest.approx(per_hour / 3600 / each["tokens_per_s"] * 1e6)
    shown = plan(model, *priced)
    assert "cost/M" in shown
    assert f"{read['cost_per_million'][0]:.3g}" in shown


@pytest.mark.parametrize(
    ("given", "problem"),
    [(["fast:0"], "'fast:0' is no device and amount"), (["fast:0=3"], "slow:0 has none")],
)
def test_a_cost_that_is_missing_or_no_number_is_refused(
    model: Path, profiles: Path, given: list[str], problem: str
) -> None:
    options = [word for each in given for word in ("--hour-cost", each)]
    assert problem in plan(model, "--devices", profiles, *options, status=2)


def test_the_picture_is_drawn_into_a_file(model: Path, profiles: Path, tmp_path: Path) -> None:
    plan(model, "--devices", profiles, "--svg", tmp_path / "plan.svg")
    drawn = (tmp_path / "plan.svg").read_text()
    assert drawn.startswith("<svg")
    assert "fast:0" in drawn


def test_a_file_that_is_no_profile_is_named(model: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    assert "--devices: no device profile" in plan(model, "--devices", wrong, status=2)
    assert "cannot be read" in plan(model, "--devices", tmp_path / "absent.json", status=2)


def test_without_profiles_of_the_model_the_remedy_is_said(model: Path, tmp_path: Path) -> None:
    assert "services.stage profile" in plan(model, "--cache-dir", tmp_path, status=2)
