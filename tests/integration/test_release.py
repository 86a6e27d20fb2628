"""A release is built from a commit alone, and refused where its parts do not agree."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from docker.release import NotReleasable, release
from tests.repository import REPOSITORY

VERSION = "0.1.0"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The commit of the checkout, with what is not committed yet as one more."""
    folder = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--no-hardlinks", str(REPOSITORY), str(folder))
    for name, value in (("user.name", "Tests"), ("user.email", "tests@example.org")):
        git(folder, "config", name, value)
    return folder


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)


def commit(folder: Path, name: str, old: str, new: str) -> None:
    path = folder / name
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    git(folder, "commit", "--quiet", "--all", "--message", "tests: a change")


def test_a_release_has_wheels_sources_images_and_checksums(clone: Path, tmp_path: Path) -> None:
    (clone / "scratch.py").write_text("left by somebody", encoding="utf-8")
    with pytest.raises(NotReleasable, match=r"scratch\.py"):
        release(clone, tmp_path / "dist")
    (clone / "scratch.py").unlink()

    made = {path.name for path in release(clone, tmp_path / "dist")}

    assert made == {
        f"shardline-{VERSION}-py3-none-any.whl",
        f"shardline_fleet-{VERSION}-py3-none-any.whl",
        f"shardline-{VERSION}.tar.gz",
        f"shardline-{VERSION}-images.tar.gz",
        "SHA256SUMS",
    }
    subprocess.run(
        ["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path / "dist", check=True
    )


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (("shared/shardline_fleet/pyproject.toml", f'"{VERSION}"', '"9.9.9"'), "one version"),
        (("CHANGELOG.md", f"## [{VERSION}] - ", "## "), "CHANGELOG"),
    ],
)
def test_parts_that_do_not_agree_are_named(
    clone: Path, tmp_path: Path, edit: tuple[str, str, str], problem: str
) -> None:
    commit(clone, *edit)
    with pytest.raises(NotReleasable, match=problem):
        release(clone, tmp_path / "dist")
    assert not (tmp_path / "dist").exists()
