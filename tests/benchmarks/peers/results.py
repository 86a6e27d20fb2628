"""What one run of the benchmark found. Owns its JSON; knows no table."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.peers.measure import Figures, Served, agreement
from tests.benchmarks.peers.plan import OURS, PLAN

HALF = "one-core-engines-half"
FULL = "one-core-engines-full"
SERVICE = "service"


@dataclass(slots=True, kw_only=True)
class Cell:
    """All runs of one engine on one workload in one precision."""

    precision: str
    workload: str
    engine: str
    runs: list[Figures] = field(default_factory=list)
    agreement: float | None = None
    """Share of prompts whose first tokens are ours."""

    @property
    def median(self) -> Figures:
        """Field by field."""
        return Figures.median(self.runs)


@dataclass(slots=True, kw_only=True)
class Results:
    """Grows while the benchmark runs."""

    command: str
    machine: dict[str, Any]
    rounds: int
    versions: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    """Reasons by engine, or by engine and workload."""
    limits: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, list[float]] = field(default_factory=dict)
    """Output tokens/s of W in bf16: HALF, FULL, SERVICE."""
    ceilings: dict[str, float] = field(default_factory=dict)
    """Output tokens/s if products alone took time, at their best rates, by `precision workload`."""
    cells: list[Cell] = field(default_factory=list)

    def cell(self, precision: str, workload: str, engine: str) -> Cell | None:
        """None if it was never run."""
        wanted = (precision, workload, engine)
        return next(
            (one for one in self.cells if (one.precision, one.workload, one.engine) == wanted), None
        )

    def note(
        self, precision: str, workload: str, engine: str, served: Served, ours: Served | None
    ) -> None:
        """One more run; `ours` served the same work."""
        cell = self.cell(precision, workload, engine)
        if cell is None:
            cell = Cell(precision=precision, workload=workload, engine=engine)
            self.cells.append(cell)
        cell.runs.append(Figures.of(served))
        if ours is not None and engine != OURS:
            cell.agreement = round(agreement(ours, served), 3)

    def engines(self, precision: str) -> list[str]:
        """Those with a figure, in the plan's order."""
        found = {cell.engine for cell in self.cells if cell.precision == precision}
        return [engine for engine in PLAN[precision] if engine in found]

    def save(self, path: Path) -> None:
        """As JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        """What `save` wrote."""
        said = json.loads(path.read_text())
        return cls(**said | {"cells": list(_cells(said["cells"]))})


def _cells(said: Iterable[dict[str, Any]]) -> Iterable[Cell]:
    for one in said:
        yield Cell(**one | {"runs": [Figures(**run) for run in one["runs"]]})
