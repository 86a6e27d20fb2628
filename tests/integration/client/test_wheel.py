"""The wheel: whole and typed, and enough by itself for a producer. Built from a copy; pip fetches
its dependencies."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.repository import REPOSITORY

SHARED = REPOSITORY / "shared"
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "shared")

PRODUCER = """
import asyncio, sys
from shardline import AsyncClient, Client, JobState

async def state(job_id):
    async with AsyncClient() as client:
        return (await client.get(job_id)).state

with Client() as client:
    job_id = client.submit("clerk", "sum: 1 + 2 =", max_tokens=8)
assert asyncio.run(state(job_id)) is JobState.QUEUED
print(sys.modules["shardline"].__file__)
"""
INSTALLED = (
    "from importlib.metadata import distributions; "
    "print(*{one.name.lower() for one in distributions()})"
)
FOREIGN = {"celery", "fastapi", "tokenizers", "torch", "transformers", "typer"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy keeps folders of earlier builds out of it, and out of the checkout."""
    source = tmp_path_factory.mktemp("source")
    target = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        path = REPOSITORY / name
        shutil.copytree(path, source / name) if path.is_dir() else shutil.copy(path, source)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target), str(source))
    (found,) = target.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def producers_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty environment with the wheel in it."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home)
    python = home / "bin" / "python"
    constraints = str(REPOSITORY / "constraints.txt")
    pip("--python", str(python), "install", "--no-compile", "--constraint", constraints, str(wheel))
    return python


def pip(*arguments: str) -> None:
    """This environment's, quietly."""
    run(Path(sys.executable), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)


def run(python: Path, *arguments: str, **environment: str) -> str:
    """What a program prints that nothing of this checkout can help."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), *arguments]
    everything = {**inherited, **environment}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=everything)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_wheel_has_every_module_and_says_that_it_is_typed(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {
            name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")
        }
    modules = {path.relative_to(SHARED).as_posix() for path in (SHARED / "shardline").rglob("*.py")}
    assert packed == modules | {"shardline/py.typed"}


def test_the_wheel_alone_is_enough_for_a_producer(
    producers_python: Path, database_url: str, redis_url: str
) -> None:
    urls = {"SHARDLINE_DATABASE_URL": database_url, "SHARDLINE_REDIS_URL": redis_url}
    loaded_from = run(producers_python, "-I", "-c", PRODUCER, **urls)
    assert Path(loaded_from.strip()).is_relative_to(producers_python.parents[1])
    installed = set(run(producers_python, "-I", "-c", INSTALLED).split())
    assert "shardline" in installed
    assert not FOREIGN & installed
