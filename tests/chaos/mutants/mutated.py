"""A copy of the repository with a mutant applied, and what ran in it. Knows no test and no
judgment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.mutants.mutant import TWINS, Mutant, Patch, Unfit
from tests.repository import REPOSITORY

COPIED = ("services", "shared", "tests", "migrations", "pyproject.toml", "compose.yaml")
"""The last is read for what Redis may hold."""
BUILT = ".build"
PRODUCT = ("services/", "shared/")
IMPORT_S = 300.0
END_S = 60.0
"""What is ended early puts its servers away first."""

WHERE = (
    "import importlib, sys\nfor name in sys.argv[1:]: print(importlib.import_module(name).__file__)"
)


class Hung(Exception):
    """No answer in time: that proves nothing either."""


@contextmanager
def copy_of(patches: Sequence[Patch]) -> Iterator[Path]:
    """The repository with these patches, in a folder of its own. Raises Unfit if its modules cannot
    be imported."""
    with tempfile.TemporaryDirectory(prefix="shardline-mutant-") as name:
        folder = Path(name)
        for entry in COPIED:
            source = REPOSITORY / entry
            if source.is_dir():
                shutil.copytree(
                    source, folder / entry, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                shutil.copy(source, folder / entry)
        if (REPOSITORY / BUILT).exists():
            (folder / BUILT).symlink_to((REPOSITORY / BUILT).resolve())
        for patch in patches:
            path = folder / patch.file
            path.write_text(patch.applied(path.read_text(encoding="utf-8")), encoding="utf-8")
        _import_from(folder, {patch.file for patch in patches})
        yield folder


def of_product(mutant: Mutant) -> tuple[Patch, ...]:
    """Without the simulation's twins: tests that hold the two together must see them differ."""
    return tuple(patch for patch in mutant.patches if not patch.file.startswith(TWINS))


def run(folder: Path, *arguments: str, timeout_s: float, **environment: str) -> str:
    """What a Python of the copy printed. Raises Hung."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(folder), str(folder / "shared"))),
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        return process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired as error:
        raise Hung(f"{' '.join(arguments)}: no end within {timeout_s:.0f} s") from error
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Also when we are ended ourselves: nothing of it stays."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.communicate(timeout=END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def _import_from(folder: Path, files: set[str]) -> None:
    """The patched modules must be importable, and be the copy's own."""
    packages = [file.removeprefix("shared/") for file in sorted(files) if file.startswith(PRODUCT)]
    names = [file.removesuffix(".py").replace("/", ".") for file in packages]
    told = run(folder, "-c", WHERE, *names, timeout_s=IMPORT_S).split("\n")[:-1]
    if len(told) != len(names) or not all(path.startswith(str(folder)) for path in told):
        raise Unfit("\n".join(told))
