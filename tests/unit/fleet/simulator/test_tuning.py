"""Tuning: what is tried, what a goal makes of an outcome, and that nothing worse than the default
is ever written."""

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
from shardline_costs import ModelCosts
from shardline_fleet.cli.simulate import profile_settings
from shardline_fleet.simulator.fleet_file import FleetFile, LoadFile, Scenario
from shardline_fleet.simulator.outcome import Outcome
from shardline_fleet.simulator.simulation import Simulation
from shardline_fleet.simulator.tuning import (
    LEAST_GAIN,
    SEATS,
    Candidate,
    Setting,
    Trial,
    Tuner,
    TuningGoal,
    cost_of,
    gain,
    values_to_try,
    with_settings,
)
from shardline_server.settings_profile import read_profile
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


def tuned(of: FleetFile, num_trials: int = 16) -> tuple[Trial, Trial, float]:
    return Tuner(of, Path(), TuningGoal.TOKENS_PER_S).run(num_trials, lambda _number, _trial: None)


def outcome(**other: Any) -> Outcome:
    return msgspec.structs.replace(Simulation(fleet(), Path()).run(), **other)


# What is tried.


def test_a_fleet_begins_with_the_settings_of_a_stage() -> None:
    fields = StageSettings.model_fields
    assert (fleet().seats, fleet().token_budget) == (
        fields["seats"].default,
        fields["token_budget"].default,
    )
    assert {setting.value for setting in Setting} <= fields.keys()


def test_one_device_has_no_lanes_and_no_dtypes_to_choose_from() -> None:
    values = values_to_try(fleet(), Path())
    assert (values[Setting.SEATS], values[Setting.SPLIT][0]) == (SEATS, "0-3")
    assert (values[Setting.LANES], values[Setting.DTYPE]) == ([], [])


def test_kept_settings_stay() -> None:
    kept = [Setting.SEATS, Setting.SPLIT]
    tried: list[Candidate] = []
    searched = fleet({"l4": 2}, seats=70)
    Tuner(searched, Path(), TuningGoal.TOKENS_PER_S, kept).run(
        12, lambda _, trial: tried.append(trial.candidate)
    )
    assert len({each[Setting.TOKEN_BUDGET] for each in tried}) > 1
    assert {(each[Setting.SEATS], each[Setting.SPLIT]) for each in tried} == {(70, None)}


def test_splits_are_the_even_one_and_the_planners(tmp_path: Path) -> None:
    model = {**SMALL, "num_hidden_layers": 12}
    of_model = ModelCosts.of(model).shapes_id
    for name, slower in (("fast.json", 1.0), ("slow.json", 3.0)):
        (tmp_path / name).write_bytes(
            msgspec.json.encode(device(name, slower=slower, model=of_model))
        )
    splits = values_to_try(fleet({"fast.json": 1, "slow.json": 1}, model=model), tmp_path)[
        Setting.SPLIT
    ]
    assert {"0-11", "0-5,6-11", "0-8,9-11"} <= set(splits)


def test_a_split_by_hand_keeps_its_number_of_stages() -> None:
    splits = values_to_try(fleet({"l4": 3}, split="0-2,3-3"), Path())[Setting.SPLIT]
    assert "0-1,2-3" in splits
    assert {str(split).count(",") for split in splits} == {1}


def test_steps_are_no_larger_than_devices_were_measured_with(tmp_path: Path) -> None:
    of_model = ModelCosts.of(SMALL).shapes_id
    found = [device("own:0", dtype=dtype, model=of_model) for dtype in ("bfloat16", "int8")]
    (tmp_path / "own.json").write_bytes(msgspec.json.encode(found))
    values = values_to_try(fleet({"own.json": 1}, dtype="int8"), tmp_path)
    assert values[Setting.TOKEN_BUDGET][-1] == 256
    assert values[Setting.DTYPE] == ["bfloat16", "int8"]


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
    default, best, times = tuned(poor)
    assert times > 1.5
    assert int(str(best.candidate[Setting.SEATS])) > 8
    for seed in (77, 78):
        before, after = (
            Simulation(with_settings(poor, trial.candidate, seed=seed), Path()).run().tokens_per_s
            for trial in (default, best)
        )
        assert after > before


def test_the_default_stays_where_nothing_is_better() -> None:
    default, best, times = tuned(fleet(seats=512, token_budget=4096), num_trials=8)
    assert best is default
    assert times == 1


def test_the_default_is_the_first_trial_and_the_same_seed_finds_the_same() -> None:
    told: list[tuple[int, Candidate]] = []
    searched = fleet({"l4": 2})
    tuner = Tuner(searched, Path(), TuningGoal.TOKENS_PER_S)
    first = tuner.run(6, lambda number, trial: told.append((number, trial.candidate)))
    assert told[0] == (0, first[0].candidate)
    assert [number for number, _ in told] == [*range(6)]
    assert tuned(searched, num_trials=6) == first


def test_a_search_ends_where_nothing_is_left_to_try() -> None:
    told: list[Candidate] = []
    kept = [setting for setting in Setting if setting is not Setting.SEATS]
    Tuner(fleet(), Path(), TuningGoal.TOKENS_PER_S, kept).run(
        100, lambda _, trial: told.append(trial.candidate)
    )
    assert {each[Setting.SEATS] for each in told} == {*SEATS}
    assert len(told) == len(SEATS)


def test_what_is_only_better_with_one_seed_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    of = fleet(seats=8, token_budget=32)
    own = {setting: getattr(of, setting) for setting in Setting}
    simulate = Tuner.simulate
    tried = list[Trial]()

    def lucky(tuner: Tuner, candidate: Candidate, seed: int) -> Trial:
        return simulate(tuner, candidate if seed == of.seed else own, seed)

    monkeypatch.setattr(Tuner, "simulate", lucky)
    tuner = Tuner(of, Path(), TuningGoal.TOKENS_PER_S)
    default, best, _ = tuner.run(8, lambda _, trial: tried.append(trial))
    assert max(gain(default, trial) for trial in tried) >= LEAST_GAIN
    assert best is default


def test_a_default_that_leaves_jobs_is_refused() -> None:
    with pytest.raises(Invalid, match="jobs are left without an end"):
        tuned(fleet(faults=[{"at_s": 0.5, "lose": 1.0}]), num_trials=1)


# What is written.


def test_a_split_comes_with_its_number_of_stages_and_replicas() -> None:
    default: Candidate = {setting: getattr(fleet(), setting) for setting in Setting}
    settings = profile_settings(fleet({"l4": 5}), {**default, Setting.SPLIT: "0-1,2-3"})
    assert (settings["num_stages"], settings["stages"], settings["replicas"]) == (2, 2, 2)
    assert "replicas" not in profile_settings(fleet({"l4": 5}), default)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_bytes(msgspec.yaml.encode(fleet(seats=8, token_budget=32)))
    return path


def test_the_command_writes_a_profile_that_a_stage_reads(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = file.with_name("tuned.env")
    options = ["--output", str(profile), "--goal", "ttft-p99", "--trials", "12", "--keep", "split"]
    done = CliRunner().invoke(cli, ["tune", str(file), *options])
    assert done.exit_code == 0
    assert "0: seats 8, token_budget 32, lanes -" in done.output
    assert "times as good as the default settings" in done.output
    assert "for ttft-p99" in profile.read_text()
    monkeypatch.setenv("SHARDLINE_PROFILE", str(profile))
    assert StageSettings(model="m").seats == int(read_profile(profile)["seats"]) > 8


def test_a_program_reads_one_document(file: Path) -> None:
    done = CliRunner().invoke(
        cli, ["tune", str(file), "-o", str(file.with_name("o.env")), "--trials", "2", "--json"]
    )
    found = json.loads(done.output)
    assert found["default"]["candidate"]["seats"] == 8
    assert found["gain"] >= 1


def test_a_fleet_that_cannot_run_is_refused(file: Path) -> None:
    file.write_text("model: [")
    assert CliRunner().invoke(cli, ["tune", str(file)]).exit_code == 2
