"""The demo's report: what counts as right, and what must hold before it calls itself a success."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.standalone.demo.report import (
    DemoPrompt,
    DemoReport,
    percentile,
    report_table,
    summarize,
)

BEGUN = datetime(2026, 1, 1, tzinfo=UTC)
STAGES = [
    {"worker": "demo-0.0@host", "layers": [0, 4], "device": "cpu:0", "kv_blocks": 8},
    {"worker": "demo-0.1@host", "layers": [4, 8], "device": "cpu:1", "kv_blocks": 8},
]

SPENT = {"energy_j": 512.25, "energy_source": "table", "cost": 0.0000427, "carbon_g": 0.0498}
UNKNOWN = dict.fromkeys(SPENT)


def row(
    asked: DemoPrompt, text: str | None, *, state: str = "succeeded", seconds: float = 1.0
) -> dict[str, Any]:
    return {
        "id": asked.id,
        "state": state,
        "created_at": BEGUN,
        "finished_at": BEGUN + timedelta(seconds=seconds),
        "text": text,
        "completion_tokens": None if text is None else 10,
        "provenance": None if text is None else {"stages": STAGES},
    }


def asked(door: str, answer: str) -> DemoPrompt:
    return DemoPrompt(id=uuid4(), door=door, task="date", answer=answer)


def good() -> DemoReport:
    first = asked("client", "1")
    second = asked("http", "2")
    found = [row(first, "1"), row(second, "2", seconds=2)]
    return summarize([first, second], found, spent=SPENT, flower_tasks_seen=2)


def test_right_answers_fill_every_figure_and_hold() -> None:
    figures = good()
    assert (figures.submitted, figures.succeeded, figures.result_rows, figures.correct) == (
        2,
        2,
        2,
        2,
    )
    assert (figures.accuracy, figures.output_tokens_per_s) == (1.0, 10.0)
    assert (figures.latency_p50_s, figures.latency_p95_s) == (1.0, 2.0)
    assert (figures.stages, figures.doors, figures.flower_tasks_seen) == (2, 2, 2)
    assert [stage.device for stage in figures.stages_seen] == ["cpu:0", "cpu:1"]
    assert figures.shortfalls(num=2, num_doors=2, min_accuracy=0.95) == []


def test_wrong_failed_and_lost_jobs_are_counted_as_what_they_are() -> None:
    wrong = asked("client", "1")
    failed = asked("http", "2")
    lost = asked("sql", "3")
    found = [row(wrong, "1 "), row(failed, None, state="failed")]
    report = summarize([wrong, failed, lost], found, spent=UNKNOWN, flower_tasks_seen=1)
    assert (report.submitted, report.succeeded, report.failed, report.correct) == (3, 1, 1, 0)
    assert report.num_by_door == {"client": 1}


def test_an_empty_demo_divides_nothing_by_zero() -> None:
    figures = summarize([], [], spent=UNKNOWN, flower_tasks_seen=0)
    assert (figures.accuracy, figures.output_tokens_per_s, figures.latency_p95_s) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "change",
    [
        {"succeeded": 1},
        {"failed": 1},
        {"result_rows": 3},
        {"accuracy": 0.94},
        {"doors": 1},
        {"flower_tasks_seen": 1},
        {"processes_left": 1},
    ],
)
def test_any_figure_that_falls_short_fails_the_demo(change: dict[str, Any]) -> None:
    figures = msgspec.structs.replace(good(), **change)
    assert len(figures.shortfalls(num=2, num_doors=2, min_accuracy=0.95)) == 1


@given(st.lists(st.floats(0, 1e6), min_size=1).map(sorted), st.floats(0.01, 1))
def test_that_share_of_values_does_not_exceed_the_percentile(
    values: list[float], share: float
) -> None:
    value = percentile(values, share)
    assert value in values
    assert sum(each <= value for each in values) >= share * len(values) - 1e-9


@pytest.mark.parametrize(
    ("spent", "shown"),
    [
        (SPENT, "512 J (table), cost 4.27e-05, 0.0498 gCO2e"),
        ({**SPENT, "cost": None, "carbon_g": None}, "512 J (table)"),
        (UNKNOWN, "not known"),
    ],
)
def test_the_energy_is_shown_with_what_is_known_of_it(spent: dict[str, Any], shown: str) -> None:
    table = report_table(msgspec.structs.replace(good(), spent=spent))
    names, values = (list(column.cells) for column in table.columns)
    assert values[names.index("energy, by SQL")] == shown
