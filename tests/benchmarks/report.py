"""What a benchmark says: one figure, what it stands beside, and the target. Owns
`results/latest.json`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

LATEST = Path(__file__).parent / "results" / "latest.json"


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """`ratio` is value / peer. `target` reads `>= 0.9` or `<= 1.2` and is about the ratio, or the
    value without one."""

    name: str
    value: float
    unit: str
    command: str
    peer: str = ""
    peer_value: float | None = None
    ratio: float | None = None
    target: str = ""
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """None without a target."""
        if not self.target:
            return None
        sign, limit = self.target.split()
        figure = self.value if self.ratio is None else self.ratio
        return figure >= float(limit) if sign == ">=" else figure <= float(limit)


def compare(
    name: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    peer: str,
    unit: str,
    target: str,
    command: str,
) -> Figure:
    """Medians of runs that alternated, and their ratio."""
    value = statistics.median(ours)
    other = statistics.median(theirs)
    return Figure(
        name=name,
        value=round(value, 3),
        unit=unit,
        peer=peer,
        peer_value=round(other, 3),
        ratio=round(value / other, 3),
        target=target,
        command=command,
    )


def save(figures: Sequence[Figure]) -> None:
    """Figures of this run; those of benchmarks that did not run keep their last value."""
    LATEST.parent.mkdir(exist_ok=True)
    known = {one["name"]: one for one in json.loads(LATEST.read_text())} if LATEST.exists() else {}
    known |= {figure.name: msgspec.to_builtins(figure) for figure in figures}
    LATEST.write_text(json.dumps(list(known.values()), indent=1) + "\n")


def show(figures: Sequence[Figure]) -> None:
    """A table for people."""
    table = Table("benchmark", "value", "peer", "ratio", "target", "met")
    for figure in figures:
        peer = f"{figure.peer} {figure.peer_value or ''}".strip()
        met = {None: "", True: "yes", False: "NO"}[figure.is_met]
        table.add_row(
            figure.name,
            f"{figure.value:g} {figure.unit}",
            peer,
            f"{figure.ratio or ''}",
            figure.target,
            met,
        )
    Console(width=140).print(table)
