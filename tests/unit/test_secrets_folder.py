"""`make secrets` makes its files where Compose reads them, however .env is written."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.repository import REPOSITORY

HOME = "home"
IN_PLACE = {
    "SHARDLINE_SECRETS_DIR=./secrets": "secrets",
    "SHARDLINE_SECRETS_DIR=./mine\r": "mine",
    'SHARDLINE_SECRETS_DIR="./my secrets"': "my secrets",
    'SHARDLINE_SECRETS_DIR="./mine"  # of this host\r': "mine",
    "SHARDLINE_SECRETS_DIR='./my $HOME'\t# as it is": "my $HOME",
    "SHARDLINE_SECRETS_DIR=./my secrets # of this host": "my secrets",
    "SHARDLINE_SECRETS_DIR=./a#b": "a#b",
    " export  SHARDLINE_SECRETS_DIR = ./mine  ": "mine",
    "#SHARDLINE_SECRETS_DIR=./a\nSHARDLINE_SECRETS_DIR=./b\nSHARDLINE_SECRETS_DIR=./c": "c",
    "SHARDLINE_SECRETS_DIR=~/mine": f"{HOME}/mine",
    'SHARDLINE_SECRETS_DIR="$HOME/mine"': f"{HOME}/mine",
    "SHARDLINE_SECRETS_DIR=${HOME}/mine": f"{HOME}/mine",
    "SHARDLINE_SECRETS_DIR=": "secrets",
    "SHARDLINE_DTYPE=float32": "secrets",
}
"""A line of .env → the folder that Docker Compose 2.40 takes from it."""


def make_secrets(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    """`make secrets` in a folder with this .env."""
    (folder / ".env").write_bytes(f"{line}\n".encode())
    (folder / "docker").mkdir()
    shutil.copy(REPOSITORY / "docker/secrets.sh", folder / "docker/secrets.sh")
    for name in ("Makefile", "constraints.txt"):
        shutil.copy(REPOSITORY / name, folder / name)
    unset = {key: value for key, value in os.environ.items() if key != "SHARDLINE_SECRETS_DIR"}
    return subprocess.run(
        ["make", "secrets"],
        cwd=folder,
        env={**unset, "HOME": str(folder / HOME)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("line", IN_PLACE)
def test_make_secrets_fills_the_folder_that_compose_reads(tmp_path: Path, line: str) -> None:
    made = make_secrets(tmp_path, line)

    assert made.returncode == 0, made.stderr
    assert [path.parent for path in tmp_path.rglob("api_key")] == [tmp_path / IN_PLACE[line]]


def test_another_variable_in_the_folder_is_refused_before_a_file_is_made(tmp_path: Path) -> None:
    made = make_secrets(tmp_path, "SHARDLINE_SECRETS_DIR=${DATA}/secrets")

    assert made.returncode != 0
    assert "SHARDLINE_SECRETS_DIR in .env has a variable" in made.stderr
    assert list(tmp_path.rglob("api_key")) == []
