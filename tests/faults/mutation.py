"""The mutation gate: applies each mutant to a copy of the repository and counts how often the tests notice.

`python -m tests.faults.mutation [--runs N] [--only WORD] [--write FILE]`. Status 0 when every test that must notice a
mutant did in at least 19 of 20 runs, and none fails without a mutant.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.faults.mutants import MUTANTS, STATEMENTS, Mutant
from tests.simulation.__main__ import BROKEN_RUNS

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("services", "shared", "tests", "migrations", "pyproject.toml")
BUILT = ".build"
SIMULATION = "simulation"
SEEDS_PER_RUN = 60
ENOUGH = 0.95
TIMEOUT_S = 900.0

BEGIN, END = "<!-- mutants: begin -->", "<!-- mutants: end -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Catch:
    """How often one test noticed one mutant."""

    mutant: str
    test: str
    num_caught: int
    num_runs: int

    @property
    def is_enough(self) -> bool:
        """19 of 20."""
        return self.num_caught >= ENOUGH * self.num_runs

    def row(self) -> str:
        """Of the table."""
        name = self.test.rpartition("::")[2].rpartition("/")[2].replace("_", " ").removesuffix(".py")
        return f"| {self.mutant} | {self.num_caught}/{self.num_runs} | {name} |"


@contextmanager
def copy_of(mutant: Mutant | None, *, with_model: bool) -> Iterator[Path]:
    """The repository with the mutant applied, in a folder of its own; to the simulation's statements too `with_model`.

    Tests that hold the two together must see them differ.
    """
    with tempfile.TemporaryDirectory(prefix="shardline-mutant-") as name:
        folder = Path(name)
        for entry in COPIED:
            source = ROOT / entry
            if source.is_dir():
                shutil.copytree(source, folder / entry, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / entry)
        if (ROOT / BUILT).exists():
            (folder / BUILT).symlink_to((ROOT / BUILT).resolve())
        for patch in mutant.patches if mutant else ():
            if patch.file == STATEMENTS and not with_model:
                continue
            path = folder / patch.file
            source_text = path.read_text(encoding="utf-8")
            assert source_text.count(patch.old) == 1, f"{patch.file}: the patch does not fit any more"
            path.write_text(source_text.replace(patch.old, patch.new), encoding="utf-8")
        yield folder


def run(folder: Path, *arguments: str, **environment: str) -> str | None:
    """What a Python of the copy printed; None when it hung."""
    path = os.pathsep.join((str(folder), str(folder / "shared")))
    try:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout


def failures(folder: Path, test: str, num_runs: int) -> int:
    """How many of so many runs of a test failed; a run counts once, whatever its parameters."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    options = ("-p", "tests.faults.repeat", "-p", "no:cacheprovider", f"--junitxml={report}", "-n", "0")
    run(folder, "pytest", test, *options, MUTANT_RUNS=str(num_runs))
    if not report.exists():
        return num_runs
    cases = ElementTree.parse(report).iter("testcase")  # noqa: S314 (pytest's own report)
    failed = {_run_of(case) for case in cases if case.find("failure") is not None or case.find("error") is not None}
    return len(failed)


def _run_of(case: ElementTree.Element) -> str:
    found = re.search(r"\brun\d+", case.get("name", "").rpartition("[")[2])
    return found[0] if found else "collection"


def storms_broken(folder: Path, num_runs: int) -> int:
    """How many of so many runs of the simulation, each with seeds of its own, found a broken promise."""
    told = run(folder, "tests.simulation", "0", f"--count={SEEDS_PER_RUN}", f"--runs={num_runs}")
    number = (told or "").rpartition(BROKEN_RUNS)[2].strip()
    return int(number) if number.isdigit() else num_runs


def judge(mutant: Mutant | None, tests: tuple[str, ...], num_runs: int, *, is_simulated: bool) -> list[Catch]:
    """All tests of one mutant."""
    name = mutant.name if mutant else "(none)"
    with copy_of(mutant, with_model=False) as folder:
        caught = {test: failures(folder, test, num_runs) for test in tests}
    if is_simulated:
        with copy_of(mutant, with_model=True) as folder:
            caught[SIMULATION] = storms_broken(folder, num_runs)
    catches = [Catch(mutant=name, test=test, num_caught=num, num_runs=num_runs) for test, num in caught.items()]
    for catch in catches:
        print(catch.row(), flush=True)
    return catches


def table(catches: list[Catch]) -> str:
    """For people."""
    return "\n".join(("| mutant | caught | by |", "|---|---|---|", *(catch.row() for catch in catches)))


def write(catches: list[Catch], path: Path) -> None:
    """Into the document, between the two marks."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    path.write_text(f"{before}{BEGIN}\n\n{table(catches)}\n\n{END}{after}", encoding="utf-8")


def main() -> int:
    """From the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.mutation", description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="runs of each test")
    parser.add_argument("--only", default="", help="mutants whose name holds this")
    parser.add_argument("--write", type=Path, help="document to write the table into")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.name]
    healthy = tuple(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
    false_alarms = judge(None, healthy, 1, is_simulated=any(mutant.is_simulated for mutant in chosen))
    catches = [
        catch
        for mutant in chosen
        for catch in judge(mutant, mutant.tests, options.runs, is_simulated=mutant.is_simulated)
    ]
    if options.write:
        write(catches, options.write)
    alarmed = [catch for catch in false_alarms if catch.num_caught]
    missed = [catch for catch in catches if not catch.is_enough]
    for catch in (*alarmed, *missed):
        print(f"NOT AS IT MUST BE: {catch.row()}")
    return 1 if alarmed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
