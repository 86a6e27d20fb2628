"""Reports the outcome of a set of jobs: counted in Postgres, found in Flower, shown as tables.
Submits nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import httpx
import msgspec
from rich.table import Table

FLOWER_TASKS = 10_000
CELL_MAX = 17


class DemoPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One submitted prompt and the only right answer."""

    id: UUID
    door: str
    task: str
    answer: str


class StageUsed(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One stage that worked on these jobs."""

    layers: tuple[int, int]
    """[first, one past the last)."""
    device: str
    worker: str


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the demo writes to demo.json."""

    submitted: int
    succeeded: int
    failed: int
    result_rows: int
    correct: int
    accuracy: float
    output_tokens_per_s: float
    latency_p50_s: float
    latency_p95_s: float
    stages: int
    doors: int
    flower_tasks_seen: int
    num_by_door: dict[str, int]
    """Succeeded jobs."""
    correct_by_task: dict[str, str]
    stages_seen: list[StageUsed]
    spent: dict[str, Any]
    """Energy, its source, and what it cost: as `costs.spent` gives it."""
    processes_left: int = 0

    def shortfalls(self, *, num: int, num_doors: int, min_accuracy: float) -> list[str]:
        """The expectations that are not met, by name."""
        demands = {
            f"{num} submitted": self.submitted == num,
            "all succeeded": self.succeeded == num,
            "none failed": self.failed == 0,
            "one result row each": self.result_rows == num,
            f"accuracy of {min_accuracy:.0%}": self.accuracy >= min_accuracy,
            f"{num_doors} doors": self.doors == num_doors,
            "every id in Flower": self.flower_tasks_seen == num,
            "no process left": self.processes_left == 0,
        }
        return [name for name, holds in demands.items() if not holds]


def num_in_flower(flower: str, ids: Sequence[UUID]) -> int:
    """How many of these ids Flower's API knows as succeeded tasks."""
    answer = httpx.get(
        f"{flower}/api/tasks",
        params={"limit": FLOWER_TASKS, "state": "SUCCESS"},
        timeout=30.0,
        trust_env=False,
    )
    answer.raise_for_status()
    return len({str(each) for each in ids} & set(answer.json()))


def summarize(
    asked: Sequence[DemoPrompt],
    found: Sequence[Mapping[str, Any]],
    *,
    spent: Mapping[str, Any],
    flower_tasks_seen: int,
) -> DemoReport:
    """Count jobs, answers, latencies and stages."""
    by_id = {row["id"]: row for row in found}
    done = [row for row in found if row["state"] == "succeeded"]
    right = {each.id for each in asked if by_id.get(each.id, {}).get("text") == each.answer}
    latencies_s = sorted((row["finished_at"] - row["created_at"]).total_seconds() for row in done)
    span_s = _span_s(done)
    seen = sorted({stage for row in done for stage in _stages(row["provenance"])})
    tasks = Counter(each.task for each in asked)
    doors = Counter(
        each.door for each in asked if by_id.get(each.id, {}).get("state") == "succeeded"
    )
    return DemoReport(
        submitted=len(asked),
        succeeded=len(done),
        failed=sum(row["state"] == "failed" for row in found),
        result_rows=sum(row["text"] is not None for row in found),
        correct=len(right),
        accuracy=len(right) / max(1, len(asked)),
        output_tokens_per_s=sum(row["completion_tokens"] for row in done) / span_s if done else 0.0,
        latency_p50_s=percentile(latencies_s, 0.5),
        latency_p95_s=percentile(latencies_s, 0.95),
        stages=len({stage.layers for stage in seen}),
        doors=len(doors),
        flower_tasks_seen=flower_tasks_seen,
        num_by_door=dict(doors),
        correct_by_task={
            task: f"{sum(each.id in right for each in asked if each.task == task)}/{num}"
            for task, num in tasks.items()
        },
        stages_seen=seen,
        spent=dict(spent),
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share does not exceed; 0 for no values."""
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0.0


def _span_s(done: Sequence[Mapping[str, Any]]) -> float:
    """Seconds from the first row to the last result, by Postgres's clock."""
    if not done:
        return 0.0
    first = min(row["created_at"] for row in done)
    last = max(row["finished_at"] for row in done)
    return max(0.001, float((last - first).total_seconds()))


def _stages(provenance: Mapping[str, Any]) -> list[StageUsed]:
    return msgspec.convert(provenance.get("stages", []), list[StageUsed])


def report_table(report: DemoReport) -> Table:
    """The report as a table."""
    table = Table("measure", "value", title="Demo report")
    table.add_row("jobs succeeded", f"{report.succeeded} of {report.submitted}")
    table.add_row("answers right", f"{report.correct} ({report.accuracy:.1%})")
    table.add_row(
        "right by task",
        "  ".join(f"{task} {share}" for task, share in report.correct_by_task.items()),
    )
    table.add_row(
        "through each door", "  ".join(f"{door} {num}" for door, num in report.num_by_door.items())
    )
    table.add_row("output tokens/s", f"{report.output_tokens_per_s:.0f}")
    table.add_row(
        "latency p50 / p95", f"{report.latency_p50_s:.2f} s / {report.latency_p95_s:.2f} s"
    )
    table.add_row("energy, by SQL", _energy(report.spent))
    for stage in report.stages_seen:
        table.add_row(
            stage.worker, f"layers {stage.layers[0]}-{stage.layers[1] - 1} on {stage.device}"
        )
    table.add_row("same ids in Flower", str(report.flower_tasks_seen))
    return table


def _energy(spent: Mapping[str, Any]) -> str:
    if spent.get("energy_j") is None:
        return "not known"
    money = (
        ""
        if spent["cost"] is None
        else f", cost {spent['cost']:.3g}, {spent['carbon_g']:.3g} gCO2e"
    )
    return f"{spent['energy_j']:.0f} J ({spent['energy_source']}){money}"


def sample_table(sample: Sequence[Mapping[str, Any]]) -> Table:
    """A few rows as SQL returned them."""
    table = Table(title="Straight from SQL")
    for name in sample[0] if sample else ():
        table.add_column(name, no_wrap=True)
    for row in sample:
        table.add_row(*(_short(str(value)) for value in row.values()))
    return table


def _short(text: str) -> str:
    """One line of a fixed length, so that the table fits on a terminal."""
    line = " ".join(text.split())
    return line if len(line) <= CELL_MAX else line[: CELL_MAX - 1] + "…"
