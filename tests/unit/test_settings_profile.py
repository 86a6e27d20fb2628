"""Settings profiles: what a stage, `make up` and Compose read of one, what goes before it, and what
it may not say."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from services.stage import __main__ as stage
from services.stage.settings import StageSettings
from services.standalone.settings import StandaloneSettings
from shardline.base.errors import Invalid
from shardline_server.refusals import REFUSED_STATUS
from shardline_server.settings_profile import PROFILE_SETTINGS, read_profile
from tests.repository import REPOSITORY

TUNED = """# By a test.
SHARDLINE_SEATS=96
SHARDLINE_TOKEN_BUDGET=512
SHARDLINE_DTYPE=bfloat16
SHARDLINE_SPLIT=0-5,6-7
SHARDLINE_NUM_STAGES=2
SHARDLINE_STAGES=2
SHARDLINE_REPLICAS=3
"""


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "tuned.env"
    path.write_text(TUNED)
    monkeypatch.setenv("SHARDLINE_PROFILE", str(path))
    monkeypatch.setenv("SHARDLINE_MODEL", "m")
    return path


def test_a_profile_may_set_what_a_stage_or_make_up_knows() -> None:
    known = StageSettings.model_fields.keys() | StandaloneSettings.model_fields.keys()
    assert set(PROFILE_SETTINGS) <= known


def test_a_stage_takes_its_own_settings_of_a_profile(profile: Path) -> None:
    settings = StageSettings()
    assert (settings.seats, settings.token_budget, settings.lanes) == (96, 512, None)
    assert (settings.dtype, settings.split, settings.num_stages) == ("bfloat16", "0-5,6-7", 2)
    assert settings.interactive_seats == 12
    assert settings.profile == profile


@pytest.mark.usefixtures("profile")
def test_make_up_takes_its_own_and_is_placed_by_them() -> None:
    settings = StandaloneSettings()
    assert (settings.stages, settings.replicas, settings.split, settings.dtype) == (
        2,
        3,
        "0-5,6-7",
        "bfloat16",
    )
    assert settings.is_placed


@pytest.mark.usefixtures("profile")
def test_the_environment_goes_before_a_profile_unless_it_is_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHARDLINE_SEATS", "8")
    monkeypatch.setenv("SHARDLINE_DTYPE", "")
    settings = StageSettings(token_budget=128)
    assert (settings.seats, settings.dtype, settings.token_budget) == (8, "bfloat16", 128)


def test_without_a_profile_defaults_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLINE_MODEL", "m")
    assert (StageSettings().seats, StageSettings().profile) == (64, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("SHARDLINE_SEAT=96", "has SHARDLINE_SEAT; a profile sets SHARDLINE_SEATS, "),
        ("SHARDLINE_REDIS_URL=redis://elsewhere", "has SHARDLINE_REDIS_URL; a profile sets"),
        ("\x00\xff", "tuned.env"),
    ],
)
def test_a_profile_that_says_anything_else_is_refused(profile: Path, text: str, said: str) -> None:
    profile.write_bytes(text.encode("latin-1"))
    with pytest.raises(Invalid, match="SHARDLINE_PROFILE: ") as refused:
        StageSettings()
    assert said in str(refused.value)


def test_a_value_out_of_bounds_is_refused_as_in_the_environment(profile: Path) -> None:
    profile.write_text("SHARDLINE_SEATS=0\n")
    with pytest.raises(ValidationError, match="seats"):
        StageSettings()


def test_a_stage_does_not_start_with_a_profile_that_is_not_there(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile.unlink()
    with pytest.raises(SystemExit, match=f"^{REFUSED_STATUS}$"):
        stage.main()
    assert "tuned.env cannot be read" in capsys.readouterr().err


def test_a_profile_without_a_setting_is_text_that_sets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "none.env"
    path.write_text("# Nothing.\nSHARDLINE_SEATS=\n")
    assert read_profile(path) == {}


def test_compose_passes_tuned_settings_on_to_its_stages() -> None:
    services = yaml.safe_load((REPOSITORY / "compose.yaml").read_text(encoding="utf-8"))["services"]
    for name, of_fleet in [
        ("stage", True),
        ("stage-cuda", True),
        ("stage-rocm", True),
        ("stage-0", False),
    ]:
        environment = services[name]["environment"]
        passed = {"seats", "token_budget", "lanes", "dtype"} | (set() if of_fleet else {"split"})
        for variable in (f"SHARDLINE_{setting.upper()}" for setting in passed):
            assert environment[variable].startswith(f"${{{variable}:-"), name
