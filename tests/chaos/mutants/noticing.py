"""Who notices a mutant: a test by an assertion, the simulation by a broken promise, a real stack by
its judge.

Knows copies of the repository and what is printed in them; knows no mutant. What hangs, cannot be
collected, or fails for want of a name has noticed nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import msgspec

from tests.chaos.mutants.mutant import Hurt, Unfit
from tests.chaos.mutants.mutated import run
from tests.chaos.report.report import FILE, Report
from tests.repository import REPOSITORY
from tests.simulation.__main__ import BROKEN_RUNS

SEEDS_PER_RUN = 300
RUN_S = 180.0
"""One run of a test or of the simulation; and so much for the first one's servers."""
STACK_S = 900.0
PATIENCE_S = 90.0
"""Everything ends so soon after the last fault on a stack whose times are shrunk, or never."""

ASSERTIONS = (
    "AssertionError",
    "assert ",
    "Failed: DID NOT RAISE",
    "hypothesis.errors.FlakyFailure",
)
NONSENSE = re.compile(
    r"^seed \d+: (NameError|TypeError|AttributeError|ImportError|SyntaxError"
    r"|UnboundLocalError|NotImplementedError) ",
    re.MULTILINE,
)
RUN = re.compile(r"\brun\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What the judge of a real stack said."""

    counts: Mapping[str, int]
    """Of the fields that were to rise, those that did."""
    others: Mapping[str, int]
    finding: str
    """The first of that kind."""


def by_test(folder: Path, test: str, num_runs: int) -> int:
    """In how many of so many runs an assertion of the test failed; whatever its parameters, a run
    counts once."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    options = (
        "-p",
        "tests.chaos.mutants.repeat",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        "-n",
        "0",
        "-q",
    )
    told = run(
        folder,
        "-m",
        "pytest",
        test,
        *options,
        timeout_s=RUN_S * (1 + num_runs),
        MUTANT_RUNS=str(num_runs),
    )
    if not report.exists():
        raise Unfit(told)
    read = ElementTree.parse(report)  # noqa: S314 (pytest's own)
    cases = [(_run_of(case), case) for case in read.iter("testcase")]
    if len({number for number, _ in cases if number}) != num_runs:
        raise Unfit(f"{test} did not run {num_runs} times\n{told[-2000:]}")
    failed: dict[str, list[str]] = {}
    for number, case in cases:
        for kind in ("failure", "error"):
            failed.setdefault(number, []).extend(
                f"{kind}: {found.get('message', '')}" for found in case.iter(kind)
            )
    strange = [why for whys in failed.values() for why in whys if not _is_assertion(why)]
    if strange:
        print(f"  {test}: not by an assertion: {strange[0][:300]}")
    return sum(any(_is_assertion(why) for why in whys) for whys in failed.values())


def _is_assertion(why: str) -> bool:
    """An assertion of the test's own body, not of a fixture's."""
    return why.startswith(tuple(f"failure: {begin}" for begin in ASSERTIONS))


def _run_of(case: ElementTree.Element) -> str:
    found = RUN.search(case.get("name", "").rpartition("[")[2])
    return found[0] if found else ""


def by_storms(folder: Path, num_runs: int) -> int:
    """In how many of so many runs of the simulation, each with seeds of its own, a promise was
    broken."""
    arguments = ("-m", "tests.simulation", "0", f"--count={SEEDS_PER_RUN}", f"--runs={num_runs}")
    told = run(folder, *arguments, timeout_s=RUN_S * (1 + num_runs))
    number = told.rpartition(BROKEN_RUNS)[2].strip()
    if not number.isdigit() or NONSENSE.search(told):
        raise Unfit(told[-2000:])
    return int(number)


def by_judge(folder: Path, hurt: Hurt, time_scale: float) -> Judged:
    """One chaos run of a real stack, the protocol's times at this scale. Raises Unfit if there was
    nothing to judge."""
    report = folder / FILE.relative_to(REPOSITORY)
    report.unlink(missing_ok=True)
    model = folder / "wide"
    if hurt.wide:
        run(folder, "-m", "tests.chaos.mutants.wide_model", str(model), timeout_s=RUN_S)
    told = run(folder, "-m", "tests.chaos", *_arguments(hurt, model, time_scale), timeout_s=STACK_S)
    if not report.exists():
        raise Unfit(told[-3000:])
    said = msgspec.json.decode(report.read_bytes(), type=Report)
    if not said.num_faults:
        raise Unfit(f"no fault was injected: {said.not_run}")
    counts = {name: number for name in INVARIANTS if (number := getattr(said, name))}
    wanted = {name: number for name, number in counts.items() if name in hurt.counts}
    findings = [
        finding for finding in said.findings if any(f" {name}: " in finding for name in wanted)
    ]
    others = {name: number for name, number in counts.items() if name not in wanted}
    return Judged(counts=wanted, others=others, finding=next(iter(findings), ""))


INVARIANTS = (
    "lost",
    "duplicated",
    "token_mismatches",
    "text_mismatches",
    "logprob_mismatches",
    "conflicts",
    "mistold",
    "refused",
    "quotas",
    "pauses",
    "schedules",
    "families",
    "webhooks",
    "bulk_acts",
    "exhausted",
    "stale_commits",
    "stale_deltas",
    "blamed",
    "kv_blocks_leaked",
    "orphans",
    "retracted",
    "late_recoveries",
    "stuck",
    "growth",
    "broken",
    "dead_threads",
)
"""Fields of chaos.json that are 0 if all is well."""


def _arguments(hurt: Hurt, wide: Path, time_scale: float) -> list[str]:
    values: dict[str, object] = {
        "seed": hurt.seed,
        "minutes": hurt.minutes,
        "faults": hurt.faults,
        "dtype": hurt.dtype,
        "load": hurt.load,
        "stages": hurt.stages,
        "replicas": hurt.replicas,
        "patience": PATIENCE_S,
        "time-scale": time_scale,
    }
    switches = {
        "--inexact": not hurt.exact,
        "--insecure": hurt.insecure,
        "--redis-lasts": hurt.redis_lasts,
    }
    flags = [name for name, holds in switches.items() if holds]
    if hurt.wide:
        values["model"] = str(wide)
    return [*(part for name, value in values.items() for part in (f"--{name}", str(value))), *flags]
