"""Tuning: what is tried, what a goal makes of an outcome, and that nothing worse than the default is ever written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from services.stage.settings import StageSettings
from shardline.base.errors import Invalid
from shardline.cli.commands import cli
from shardline_fleet.planner import ModelCosts
from shardline_fleet.settings_profile import read_profile
from shardline_fleet.simulator.fleet_file import FleetFile, LoadFile, Scenario
from shardline_fleet.simulator.outcome import Outcome
from shardline_fleet.simulator.simulation import Simulation
from shardline_fleet.simulator.tuning import __main__ as command
from shardline_fleet.simulator.tuning.goal import TuningGoal, cost_of
from shardline_fleet.simulator.tuning.report import settings_of, verdict
from shardline_fleet.simulator.tuning.space import Candidate, Setting, Space, applied
from shardline_fleet.simulator.tuning.tuner import WORTH, Tried, Tuned, Tuner
from tests.repository import REPOSITORY
from tests.unit.fleet.planner.fleets import device
from tests.unit.fleet.simulator.test_simulation import SLOW_LAYERS, SMALL

BATCH = {"jobs": 60, "prompt": 16, "output": 16}


def fleet(devices: dict[str, int] | None = None, **other: Any) -> FleetFile:
    text = {
        "model": SMALL,
        "cells": [{"devices": devices or {"l4": 1}}],
        "assumed": SLOW_LAYERS,
        "load": BATCH,
        **other,
    }
    return msgspec.convert(text, FleetFile)


def tuned(
    of: FleetFile, goal: TuningGoal = TuningGoal.TOKENS_PER_S, num_trials: int = 12, folder: Path = Path()
) -> Tuned:
    return Tuner(of, folder, goal, Space.of(of, folder)).run(num_trials, lambda _number, _tried: None)


def outcome(**other: Any) -> Outcome:
    return msgspec.structs.replace(Simulation(fleet(), Path()).run(), **other)


# What is tried.


def test_a_fleet_begins_with_the_settings_of_a_stage() -> None:
    fields = StageSettings.model_fields
    assert Space.of(fleet(), Path()).default == {setting: getattr(fleet(), setting) for setting in Setting}
    assert (fleet().seats, fleet().token_budget) == (fields["seats"].default, fields["token_budget"].default)
    assert {setting.value for setting in Setting} <= fields.keys()


def test_one_device_has_no_lanes_and_no_dtypes_to_choose_from() -> None:
    assert Space.of(fleet(), Path()).searched == [Setting.SEATS, Setting.TOKEN_BUDGET, Setting.SPLIT]


def test_own_values_are_tried_too_in_their_order() -> None:
    values = Space.of(fleet(seats=70), Path()).values[Setting.SEATS]
    assert values == [8, 16, 24, 32, 48, 64, 70, 96, 128, 192, 256, 384, 512]


def test_kept_settings_stay() -> None:
    space = Space.of(fleet({"l4": 2}, seats=70), Path(), [Setting.SEATS, Setting.SPLIT])
    assert space.searched == [Setting.TOKEN_BUDGET, Setting.LANES]
    assert space.values[Setting.SEATS] == [70]


def test_splits_lead_from_the_even_one_to_the_plan_and_a_layer_beyond(tmp_path: Path) -> None:
    model = {**SMALL, "num_hidden_layers": 12}
    of_model = ModelCosts.of(model).shapes_id
    for name, slower in (("fast.json", 1.0), ("slow.json", 3.0)):
        (tmp_path / name).write_bytes(msgspec.json.encode(device(name, slower=slower, model=of_model)))
    splits = Space.of(fleet({"fast.json": 1, "slow.json": 1}, model=model), tmp_path).values[Setting.SPLIT]
    assert splits == [None, "0-11", "0-5,6-11", "0-6,7-11", "0-7,8-11", "0-8,9-11", "0-9,10-11"]


def test_a_split_by_hand_keeps_its_number_of_stages() -> None:
    splits = Space.of(fleet({"l4": 3}, split="0-2,3-3"), Path()).values[Setting.SPLIT]
    assert {"0-2,3-3", "0-1,2-3"} <= set(splits)
    assert {str(split).count(",") for split in splits} == {1}


def test_steps_are_no_larger_than_devices_were_measured_with(tmp_path: Path) -> None:
    of_model = ModelCosts.of(SMALL).shapes_id
    found = [device("own:0", dtype=dtype, model=of_model) for dtype in ("bfloat16", "int8")]
    (tmp_path / "own.json").write_bytes(msgspec.json.encode(found))
    space = Space.of(fleet({"own.json": 1}, dtype="int8"), tmp_path)
    assert space.values[Setting.TOKEN_BUDGET][-1] == 256
    assert space.values[Setting.DTYPE] == ["bfloat16", "int8"]


# What a goal makes of an outcome.


def test_goals_are_seconds_and_jobs_without_an_end_have_none() -> None:
    load = LoadFile()
    assert cost_of(TuningGoal.TOKENS_PER_S, outcome(tokens_per_s=50.0), load) == pytest.approx(0.02)
    assert cost_of(TuningGoal.TTFT_P99, outcome(), load) == outcome().ttft_s.p99
    assert cost_of(TuningGoal.REQUEST_P50, outcome(), load) == outcome().request_s.p50
    assert cost_of(TuningGoal.TOKENS_PER_S, outcome(unfinished=1.0), load) is None
    assert cost_of(TuningGoal.TOKENS_PER_S, outcome(failed=1.0), load) is None


def test_bounds_come_before_any_goal() -> None:
    load = LoadFile(scenario=Scenario.SERVER, ttft_s=0.001)
    goal = TuningGoal.TOKENS_PER_S
    kept = cost_of(goal, outcome(keeps_bounds=True, tokens_per_s=1.0), load)
    broken = cost_of(goal, outcome(keeps_bounds=False, tokens_per_s=1e5), load)
    assert kept == 1.0
    assert broken is not None
    assert broken > kept


# What is found.


def test_a_poor_default_is_left_for_something_that_holds_with_other_seeds() -> None:
    poor = fleet(seats=8, token_budget=32, load={**BATCH, "spread": 0.5})
    found = tuned(poor)
    assert found.gain > 1.5
    assert int(str(found.best.candidate[Setting.SEATS])) > 8
    for seed in (77, 78):
        before, after = (
            Simulation(msgspec.structs.replace(applied(poor, candidate), seed=seed), Path()).run().tokens_per_s
            for candidate in (found.default.candidate, found.best.candidate)
        )
        assert after > before


def test_what_differs_from_the_default_is_worth_it() -> None:
    poor = fleet({"l4": 2}, seats=8, token_budget=32)
    found = tuned(poor)
    changed = [setting for setting in Setting if found.best.candidate[setting] != found.default.candidate[setting]]
    assert changed
    for setting in changed:
        without = {**found.best.candidate, setting: found.default.candidate[setting]}
        speed = Simulation(applied(poor, without), Path()).run().tokens_per_s
        assert found.best.outcome is not None
        assert speed * WORTH < found.best.outcome.tokens_per_s


def test_the_default_stays_where_nothing_is_better() -> None:
    found = tuned(fleet(seats=512, token_budget=4096), num_trials=8)
    assert found.best is found.default
    assert (found.gain, verdict(found)) == (1.0, "the default settings: nothing was better with other seeds too")


def test_the_default_is_the_first_trial_and_the_same_seed_finds_the_same() -> None:
    told: list[tuple[int, Any]] = []
    searched = fleet({"l4": 2})
    tuner = Tuner(searched, Path(), TuningGoal.TOKENS_PER_S, Space.of(searched, Path()))
    first = tuner.run(6, lambda number, tried: told.append((number, tried.candidate)))
    assert told[0] == (0, first.default.candidate)
    assert [number for number, _ in told] == [*range(6)]
    assert tuned(searched, num_trials=6) == first


def test_what_is_only_better_with_one_seed_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    of = fleet(seats=8, token_budget=32)
    tuner = Tuner(of, Path(), TuningGoal.TOKENS_PER_S, Space.of(of, Path()))
    default, simulated = Space.of(of, Path()).default, tuner._simulated

    def lucky(candidate: Candidate, seed: int) -> Tried:
        return simulated(candidate if seed == of.seed else default, seed)

    monkeypatch.setattr(tuner, "_simulated", lucky)
    found = tuner.run(8, lambda _number, _tried: None)
    assert found.tried[0] is not found.default
    assert found.best is found.default


def test_a_default_that_leaves_jobs_is_refused() -> None:
    with pytest.raises(Invalid, match="jobs are left without an end"):
        tuned(fleet(faults=[{"at_s": 0.5, "lose": 1.0}]), num_trials=1)


# What is written.


def test_a_split_comes_with_its_number_of_stages_and_replicas() -> None:
    default = Space.of(fleet({"l4": 5}), Path()).default
    settings = settings_of(fleet({"l4": 5}), {**default, Setting.SPLIT: "0-1,2-3"})
    assert (settings["num_stages"], settings["stages"], settings["replicas"]) == (2, 2, 2)
    assert "replicas" not in settings_of(fleet({"l4": 5}), default)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_bytes(msgspec.yaml.encode(fleet(seats=8, token_budget=32)))
    return path


def test_the_command_writes_a_profile_that_a_stage_reads(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = file.with_name("tuned.env")
    command.tune(file, output=profile, trials=12, keep=[Setting.SPLIT])
    shown = capsys.readouterr().out
    assert "0: seats 8, token_budget 32, lanes -" in shown
    assert "times as good as the default settings" in shown
    monkeypatch.setenv("SHARDLINE_PROFILE", str(profile))
    assert StageSettings(model="m").seats == int(read_profile(profile)["seats"]) > 8


def test_a_program_reads_one_document(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.tune(file, output=file.with_name("tuned.env"), trials=2, json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["default"]["candidate"]["seats"] == 8
    assert found["gain"] >= 1


def test_shardline_tune_starts_it_with_all_options(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    options = ["--output", str(file.with_name("o.env")), "--goal", "ttft-p99", "--trials", "1", "--keep", "seats"]
    assert CliRunner().invoke(cli, ["tune", str(file), *options]).exit_code == 0
    assert "for ttft-p99" in file.with_name("o.env").read_text()
