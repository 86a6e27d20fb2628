"""Folders in shared places: made for one user alone, refused with a remedy when somebody else was
there first."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from services.stage.device.locks import DeviceLocks
from services.stage.hop_sockets import hop_sockets
from services.stage.settings import StageSettings
from services.standalone.cores import CoreClaims
from shardline.base.errors import Invalid
from shardline_server.host.private import (
    open_private_file,
    open_private_folder,
    private_folder,
    user_folder,
)

STRANGER = 54_321


def foreign(path: Path) -> Path:
    """A folder that another user has made."""
    path.mkdir()
    os.chown(path, STRANGER, STRANGER)
    return path


def test_a_new_folder_is_its_users_alone(tmp_path: Path) -> None:
    path = private_folder(tmp_path / "a" / "b", "FIELD")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert private_folder(path, "FIELD") == path, "and so it is found again"


@pytest.mark.parametrize(
    "make", [foreign, lambda path: path.symlink_to(path.parent), lambda path: path.write_text("")]
)
def test_another_owners_file_in_place_of_a_folder_names_field_and_remedy(
    tmp_path: Path, make: object
) -> None:
    assert callable(make)
    make(tmp_path / "x")
    with pytest.raises(Invalid, match=r"FIELD: .*x.*\. Remove it"):
        private_folder(tmp_path / "x", "FIELD")


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_in_which_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x").chmod(mode)
    with pytest.raises(Invalid, match=r"FIELD: others may write in .* \(mode .*\)\. .*chmod go-w"):
        private_folder(tmp_path / "x", "FIELD")


def test_a_users_own_folder_that_a_stranger_has_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert user_folder() == tmp_path / "shardline"
    (foreign(user_folder()) / "locks").mkdir()
    with pytest.raises(Invalid, match="belongs to the user with the id 54321"):
        private_folder(user_folder() / "locks", "FIELD")


def test_files_are_made_in_the_opened_folder_though_its_name_moves(tmp_path: Path) -> None:
    folder = open_private_folder(tmp_path / "mine", "FIELD")
    (tmp_path / "mine").rename(tmp_path / "moved")
    foreign(tmp_path / "mine")
    os.close(open_private_file(folder, "f", "FIELD"))
    os.close(folder)
    assert (tmp_path / "moved" / "f").exists()
    assert not (tmp_path / "mine" / "f").exists()


@pytest.mark.parametrize("lay", [Path.symlink_to, Path.hardlink_to])
def test_a_link_in_place_of_a_core_lock_leaves_its_target_unchanged(
    tmp_path: Path, lay: object
) -> None:
    assert callable(lay)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "locks").mkdir(mode=0o700)
    lay(tmp_path / "locks" / "core-0.lock", victim)
    with pytest.raises(Invalid, match=r"SHARDLINE_LOCK_DIR: core-0\.lock"):
        DeviceLocks(tmp_path / "locks", ["core-0"], worker="one")
    with pytest.raises(Invalid, match=r"XDG_RUNTIME_DIR: core-0\.lock"):
        CoreClaims(tmp_path / "locks").claim([0])
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("make", [foreign, lambda path: path.symlink_to(path.parent)])
def test_a_stage_puts_no_locks_and_no_hops_into_a_folder_that_is_not_ours(
    tmp_path: Path, make: object
) -> None:
    assert callable(make)
    make(tmp_path / "x")
    with pytest.raises(Invalid, match="SHARDLINE_LOCK_DIR"):
        DeviceLocks(tmp_path / "x", ["core-0"], worker="one")
    with pytest.raises(Invalid, match="SHARDLINE_RUN_DIR"):
        hop_sockets(StageSettings(model="m", run_dir=tmp_path / "x"))
    with pytest.raises(Invalid, match="XDG_RUNTIME_DIR"):
        CoreClaims(tmp_path / "x").claim([0])


def test_locks_and_hops_are_in_the_users_own_folder_by_default() -> None:
    settings = StageSettings(model="m")
    assert settings.lock_dir.parent == settings.run_dir.parent == user_folder()
