"""The mutation gate: applies each mutant to a copy of the repository and counts how often what must
notice does.

`python -m tests.chaos.mutants.mutation [--runs N] [--only WORD] [--on tests|stack] [--write FILE]`.
Each test and the simulation must notice in at least 19 of 20 runs, and the judge of a real stack
once; none of them may without a mutant. Status 0 if all that is so. The table in FILE gets the rows
of what ran, and keeps the others: mutants may be run one by one, in any checkout.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tests.chaos.mutants.catalog import MUTANTS
from tests.chaos.mutants.mutant import Hurt, Mutant, Patch, Unfit
from tests.chaos.mutants.mutated import Hung, copy_of, of_product
from tests.chaos.mutants.noticing import Judged, by_judge, by_storms, by_test
from tests.chaos.mutants.table import Seen, short, update
from tests.chaos.stack.options import TIME_SCALE

SIMULATION = "simulation"
ENOUGH = 0.95
NOBODY = "(none)"


def problems_of(mutant: Mutant, seen: Seen) -> Iterator[str]:
    """What did not notice, or not often enough."""
    for test, (num_caught, num_runs) in (seen.caught or {}).items():
        if num_caught < ENOUGH * num_runs:
            yield f"{mutant.name}: {test} noticed it in {num_caught} of {num_runs} runs"
    if seen.ran_stack and not (seen.stack and seen.stack.counts):
        yield f"{mutant.name}: the judge of a real stack did not notice it: {seen.stack}"


def judge_by_tests(mutant: Mutant, num_runs: int) -> dict[str, tuple[int, int]]:
    """Each test of a mutant, and the simulation."""
    caught: dict[str, tuple[int, int]] = {}
    for test in (*mutant.tests, *([SIMULATION] if mutant.is_simulated else [])):
        caught[test] = (_counted(mutant, test, num_runs), num_runs)
    return caught


def _counted(mutant: Mutant, test: str, num_runs: int) -> int:
    name = mutant.name
    began_s = time.monotonic()
    try:
        with copy_of(mutant.patches if test == SIMULATION else of_product(mutant)) as folder:
            num_caught = (
                by_storms(folder, num_runs)
                if test == SIMULATION
                else by_test(folder, test, num_runs)
            )
    except (Hung, Unfit) as error:
        say(f"{name}: {short(test)}: {error}")
        return 0
    say(f"{name}: {short(test)}: {num_caught}/{num_runs} in {time.monotonic() - began_s:.0f} s")
    return num_caught


def judge_by_stack(
    name: str, patches: Sequence[Patch], hurt: Hurt, time_scale: float
) -> Judged | None:
    """A real stack with these patches. None when there was nothing to judge."""
    began_s = time.monotonic()
    try:
        with copy_of(patches) as folder:
            judged = by_judge(folder, hurt, time_scale)
    except (Hung, Unfit) as error:
        say(f"{name}: real stack: {error}")
        return None
    say(f"{name}: real stack: {judged} in {time.monotonic() - began_s:.0f} s")
    return judged


def false_alarms(
    mutants: Sequence[Mutant], *, on_tests: bool, on_stack: bool, time_scale: float
) -> list[str]:
    """What fails although nothing is broken."""
    found = []
    if on_tests:
        tests = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
        healthy = Mutant(
            name=NOBODY,
            patches=(),
            tests=tests,
            is_simulated=any(each.is_simulated for each in mutants),
        )
        caught = judge_by_tests(healthy, 1)
        found += [
            f"{test} fails without a mutant"
            for test, (num_caught, _) in caught.items()
            if num_caught
        ]
    if on_stack:
        for hurt in together([mutant.hurt for mutant in mutants if mutant.hurt]):
            judged = judge_by_stack(NOBODY, (), hurt, time_scale)
            if judged is None or judged.counts or judged.others:
                found.append(f"without a mutant, {hurt} gives {judged}")
    return found


def together(hurts: Sequence[Hurt]) -> list[Hurt]:
    """As few runs as do the same to the same stacks."""
    by_stack: dict[Hurt, list[Hurt]] = {}
    for hurt in dict.fromkeys(hurts):
        by_stack.setdefault(replace(hurt, faults="", counts=(), minutes=0.0), []).append(hurt)
    return [
        replace(
            stack,
            faults=",".join(dict.fromkeys(kind for one in same for kind in one.faults.split(","))),
            minutes=sum(one.minutes for one in same),
        )
        for stack, same in by_stack.items()
    ]


def see(
    mutant: Mutant, *, on_tests: bool, on_stack: bool, num_runs: int, time_scale: float
) -> Seen:
    """What tests and a real stack notice of a mutant."""
    caught = judge_by_tests(mutant, num_runs) if on_tests else None
    if not on_stack or mutant.hurt is None:
        return Seen(caught=caught, stack=None, ran_stack=False)
    layers = mutant.hidden_by.patches if mutant.hidden_by else ()
    stack = judge_by_stack(mutant.name, (*of_product(mutant), *layers), mutant.hurt, time_scale)
    return Seen(caught=caught, stack=stack, ran_stack=True)


def say(line: str) -> None:
    """Progress."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def options() -> argparse.Namespace:
    """From the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.mutants.mutation", description=__doc__
    )
    parser.add_argument("--runs", type=int, default=20, help="runs of each test")
    parser.add_argument("--only", default="", help="mutants whose name holds this")
    parser.add_argument(
        "--on", choices=("all", "tests", "stack"), default="all", help="who is to notice"
    )
    parser.add_argument(
        "--time-scale",
        type=float,
        default=TIME_SCALE,
        help="of real stacks: more on a busy machine",
    )
    parser.add_argument("--sure", action="store_true", help="leave out the runs without a mutant")
    parser.add_argument(
        "--write", type=Path, help="document whose table gets what was seen; its other rows stay"
    )
    return parser.parse_args()


def main() -> int:
    """The whole gate, or a part of it."""
    chosen = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    mutants = [mutant for mutant in MUTANTS if chosen.only in mutant.name]
    on_tests = chosen.on != "stack"
    on_stack = chosen.on != "tests"
    scale = chosen.time_scale
    problems = (
        []
        if chosen.sure
        else false_alarms(mutants, on_tests=on_tests, on_stack=on_stack, time_scale=scale)
    )
    for mutant in mutants:
        seen = see(
            mutant, on_tests=on_tests, on_stack=on_stack, num_runs=chosen.runs, time_scale=scale
        )
        problems += problems_of(mutant, seen)
        if chosen.write:
            update(chosen.write, MUTANTS, {mutant.name: seen})
    for problem in problems:
        say(f"NOT AS IT MUST BE: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
