"""The table of mutants in a document, which is also the memory of earlier runs. Knows how to read
and write it, no run.

A run replaces what it has seen: both halves of a mutant, or the tests alone, or the real stack
alone. All else stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.chaos.mutants.mutant import Mutant
from tests.chaos.mutants.noticing import Judged

BEGIN = "<!-- mutants: begin -->"
END = "<!-- mutants: end -->"
HEADER = ("|mutant|caught|by|real stack|", "|---|---|---|---|")
NOTHING = "-"
SAME = "″"
"""The mutant of the row above."""


class Row(NamedTuple):
    """One test of a mutant; the real stack stands in the mutant's first row."""

    mutant: str
    caught: str
    by: str
    stack: str = ""


class Seen(NamedTuple):
    """What one run has seen of a mutant; None for a half that did not run."""

    caught: Mapping[str, tuple[int, int]] | None
    """By each test: in how many runs, of how many."""
    stack: Judged | None
    ran_stack: bool


def update(path: Path, mutants: Sequence[Mutant], seen: Mapping[str, Seen]) -> None:
    """Puts what was seen into the document's table, which is in the order of `mutants`; rows of
    other mutants go."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    table, _, after = rest.partition(END)
    old = rows_of(table)
    rows = [
        row if place == 0 else row._replace(mutant=SAME)
        for mutant in mutants
        for place, row in enumerate(merged(mutant, old.get(mutant.name, []), seen.get(mutant.name)))
    ]
    text = "\n".join((*HEADER, *(f"|{'|'.join(row)}|" for row in rows)))
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def rows_of(table: str) -> dict[str, list[Row]]:
    """The rows of a table as it was written, by mutant."""
    rows: dict[str, list[Row]] = {}
    mutant = ""
    for line in table.strip().splitlines()[len(HEADER) :]:
        row = Row(*(cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")))
        mutant = mutant if row.mutant == SAME else row.mutant
        rows.setdefault(mutant, []).append(row._replace(mutant=mutant))
    return rows


def merged(mutant: Mutant, old: Sequence[Row], seen: Seen | None) -> list[Row]:
    """A mutant's rows after a run."""
    if seen is None:
        return list(old)
    stack = _stack_cell(mutant, seen.stack) if seen.ran_stack or not old else old[0].stack
    if seen.caught is None:
        tests = [(row.caught, row.by) for row in old] or [(NOTHING, NOTHING)]
    else:
        tests = [
            (f"{num_caught}/{num_runs}", short(test))
            for test, (num_caught, num_runs) in seen.caught.items()
        ]
    return [
        Row(mutant.name, caught, by, "" if place else stack)
        for place, (caught, by) in enumerate(tests)
    ]


def _stack_cell(mutant: Mutant, judged: Judged | None) -> str:
    if mutant.hurt is None or judged is None or not judged.counts:
        return NOTHING
    counts = ", ".join(f"`{name}` {number}" for name, number in judged.counts.items())
    behind = f"; with {mutant.hidden_by.name} broken too" if mutant.hidden_by else ""
    return f"{counts} under {mutant.hurt.faults}{behind}"


def short(test: str) -> str:
    """A test's name in words."""
    return test.rpartition("::")[2].rpartition("/")[2].replace("_", " ").removesuffix(".py")
