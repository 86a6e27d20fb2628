"""`python -m services.stage profile`, as `make up` and a person run it: a device's profile, known
the next time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from io import StringIO
from itertools import count
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from services.stage.fleet import profiling
from services.stage.fleet.profiling import recalled, retime
from services.stage.fleet.step_timing import Clock
from services.stage.settings import StageSettings
from shardline_costs import DeviceProfile, ModelCosts, Workload, read_profiles
from shardline_fleet.planner import make_plans
from tests.models import save_model
from tests.pinned import first_core, own_cores

MEASURED = "device measured"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiling")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    """Its layers are of two kinds."""
    return save_model(folder / "model", "gemma2")


@pytest.fixture(scope="module")
def first(folder: Path, model: Path) -> subprocess.CompletedProcess[str]:
    return profile(folder, model)


def profile(
    folder: Path, model: Path, *arguments: str, **settings: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.stage", "profile", *arguments],
        env={**os.environ, **environment(folder, model), **settings},
        input="\n",
        capture_output=True,
        text=True,
        check=False,
    )


def environment(folder: Path, model: Path) -> dict[str, str]:
    return {
        "SHARDLINE_MODEL": str(model),
        "SHARDLINE_DEVICE": f"cpu:{own_cores()[0]}",
        "SHARDLINE_TOKEN_BUDGET": "64",
        "SHARDLINE_LOCK_DIR": str(folder / "locks"),
        "SHARDLINE_CACHE_DIR": str(folder / "cache"),
        "SHARDLINE_LOG_FORMAT": "json",
    }


@pytest.fixture
def here(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> StageSettings:
    """What `profile` gives a process, for this one."""
    for name, value in environment(folder, model).items():
        monkeypatch.setenv(name, value)
    return StageSettings()


def profile_here(
    settings: StageSettings, *, fresh: bool = False, together: bool = False
) -> DeviceProfile:
    with first_core(settings.lock_dir) as device:
        return profiling.profile(settings, device, fresh=fresh, together=together)


def has_measured_here(
    settings: StageSettings, *, fresh: bool = False, together: bool = False
) -> bool:
    with capture_logs() as logs:
        profile_here(settings, fresh=fresh, together=together)
    return MEASURED in {line["event"] for line in logs}


def found(run: subprocess.CompletedProcess[str]) -> DeviceProfile:
    assert run.returncode == 0, run.stderr
    (only,) = read_profiles(run.stdout.splitlines()[-1].encode())
    return only


def test_a_profile_has_times_of_each_kind_of_layer(
    first: subprocess.CompletedProcess[str], model: Path
) -> None:
    measured = found(first)
    costs = ModelCosts.read(model)
    assert set(measured.layers) == set(costs.kinds) == {"sliding_attention", "full_attention"}
    for times in measured.layers.values():
        assert [rows for rows, _ in times.rows] == [1, 8, 32, 64]
        assert times.rows[-1][1] > 0
    assert (measured.model, measured.dtype) == (costs.shapes_id, "float32")
    assert measured.host_memory is not None
    assert measured.sampled[-1][1] > 0
    assert measured.memory_bytes > costs.num_weights
    assert make_plans(costs, [measured], Workload()).best.split == f"0-{len(costs.layers) - 1}"


def test_a_known_device_is_not_measured_again(
    first: subprocess.CompletedProcess[str], here: StageSettings
) -> None:
    assert MEASURED in first.stderr
    assert not has_measured_here(here)
    assert profile_here(here) == found(first)


@pytest.mark.usefixtures("first")
def test_a_plan_measures_again_what_was_measured_beside_others(
    here: StageSettings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = shutil.copytree(folder / "cache", folder / "busy")
    (file,) = (cache / "profiles").iterdir()
    (known,) = read_profiles(file.read_bytes())

    def has_measured(others_share: float) -> bool:
        noted = msgspec.structs.replace(known, others_share=others_share)
        file.write_bytes(msgspec.json.encode(noted))
        monkeypatch.setattr(sys, "stdin", StringIO("\n"))
        return has_measured_here(here.model_copy(update={"cache_dir": cache}), together=True)

    assert not has_measured(0.05)
    assert has_measured(0.5)


def test_a_core_that_another_program_uses_is_noticed(here: StageSettings, folder: Path) -> None:
    spin = (
        "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print(flush=True)\n"
        "while True: pass"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", spin, str(own_cores()[0])], stdout=subprocess.PIPE
    )
    try:
        assert other.stdout is not None
        other.stdout.readline()
        assert profile_here(here.model_copy(update={"cache_dir": folder / "beside"})).was_busy
    finally:
        other.kill()
        other.communicate()


def test_what_a_busy_machine_measures_can_be_read(
    here: StageSettings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run takes longer than the one before it, so that a part takes more than the whole."""
    times = count(1.0)
    monkeypatch.setattr(Clock, "seconds", lambda _self, _run: next(times))
    measured = profile_here(here.model_copy(update={"cache_dir": folder / "shrinking"}), fresh=True)
    assert read_profiles(msgspec.json.encode(measured)) == [measured]
    assert measured.sampled[-1][1] == 0


def test_a_limit_is_all_that_a_plan_may_use_and_its_own(
    first: subprocess.CompletedProcess[str], here: StageSettings
) -> None:
    limited = profile_here(here.model_copy(update={"memory_mib": 3}))
    assert limited == msgspec.structs.replace(found(first), memory_bytes=3 << 20, host_memory=None)


def test_other_dtypes_are_measured_side_by_side_when_told(folder: Path, model: Path) -> None:
    run = profile(folder, model, "--together", SHARDLINE_DTYPE="int8")
    assert run.stdout.startswith("ready\n")
    assert found(run).dtype == "int8"
    assert MEASURED in run.stderr


@pytest.mark.usefixtures("first")
def test_what_was_measured_before_is_measured_afresh_when_told(here: StageSettings) -> None:
    assert has_measured_here(here, fresh=True)


@pytest.mark.usefixtures("first")
def test_times_that_have_drifted_are_recalled_and_nothing_else_changes(
    here: StageSettings, folder: Path, model: Path
) -> None:
    cache = shutil.copytree(folder / "cache", folder / "drifted")
    settings = here.model_copy(update={"cache_dir": cache})
    with first_core(settings.lock_dir) as device:
        measured = recalled(settings, device, model)
        assert measured is not None
        slower = msgspec.structs.replace(measured.scaled(2.0), memory_bytes=1)
        for _ in range(2):  # two workers that share the device find the same
            retime(settings, device, model, slower)
        assert recalled(settings, device, model) == measured.scaled(2.0)
        for other in ({"token_budget": 128}, {"device_shared": True}):
            assert recalled(settings.model_copy(update=other), device, model) is None


def test_plans_count_on_streamed_layers_unless_an_accelerators_graphs_exclude_them() -> None:
    auto = StageSettings(model="/models/big", streamed_layers="auto", cuda_graphs=True)
    assert (auto.streams_on(cores=True), auto.streams_on(cores=False)) == (True, False)
    assert auto.model_copy(update={"cuda_graphs": False}).streams_on(cores=False)
    assert not StageSettings(model="/models/big", streamed_layers=3).streams_on(cores=True)


def test_a_wrong_setting_is_named(folder: Path, model: Path) -> None:
    run = profile(folder, model, SHARDLINE_DEVICE="cpu:4095")
    assert (run.returncode, run.stdout) == (1, "")
    assert "SHARDLINE_DEVICE" in run.stderr
