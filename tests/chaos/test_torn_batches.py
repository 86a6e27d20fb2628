"""The judge of batches: a line without an outcome, with two, or with another one than its job has
must be found, and counts that are not those of the lines."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.chaos.judge.batches import BatchTrial
from tests.chaos.load.batches.sent_batch import (
    COMPLETIONS,
    BatchKind,
    SentBatch,
    SentLine,
    draw_batch,
)
from tests.chaos.load.users import CLERK
from tests.chaos.load.workload import of_users

NAME = "batch_0"


def outcome(place: int, **fields: Any) -> str:
    empty = {"id": f"{NAME}-{place}", "custom_id": f"{place}", "response": None, "error": None}
    return json.dumps({**empty, **fields}, separators=(",", ":"))


def answer(place: int, text: str = "a") -> str:
    body = {"choices": [{"text": text, "token_ids": [5]}], "usage": {"total_tokens": 3}}
    return outcome(place, response={"status_code": 200, "body": body})


REFUSAL = outcome(3, response={"status_code": 400, "body": {}})


def trial(
    *,
    output: tuple[str, ...] = (answer(1), answer(2)),
    errors: tuple[str, ...] = (REFUSAL,),
    lines: tuple[int, ...] = (1, 2, 3),
    jobs: tuple[int, ...] = (1, 2),
    failed: int = 1,
    early: str = answer(1),
    began_at: int | None = 1,
) -> list[str]:
    """What is found of a batch of two good lines and a broken one."""
    sent = SentBatch(
        name="n",
        kind=BatchKind.PLAIN,
        endpoint=COMPLETIONS,
        lines=[
            SentLine(custom_id=f"{place}", number=number, content="")
            for place, number in ((1, 0), (2, 1), (3, None))
        ],
        document={
            "id": NAME,
            "status": "completed",
            "in_progress_at": began_at,
            "request_counts": {"total": 3, "completed": 2, "failed": failed},
            "usage": {"total_tokens": 6},
        },
        early={f"{NAME}-1": early.encode()},
        files={
            "output_file_id": "\n".join(output).encode(),
            "error_file_id": "\n".join(errors).encode(),
        },
    )
    rows = [{"line": place, "custom_id": f"{place}"} for place in lines]
    its = [
        {"line": place, "place": 0, "text": "a", "token_ids": [5], "has_tools": False}
        for place in jobs
    ]
    return [count for count, _ in BatchTrial(batch=sent, lines=rows, jobs=its).problems()]


def test_a_batch_with_one_outcome_for_each_line_is_no_finding() -> None:
    assert trial() == []


@pytest.mark.parametrize(
    ("broken", "count"),
    [
        pytest.param({"output": (answer(1),)}, "lost", id="a line has no outcome"),
        pytest.param({"output": (answer(1), answer(2), answer(2))}, "duplicated", id="has two"),
        pytest.param({"lines": (1, 2)}, "lost", id="a line is no row"),
        pytest.param({"jobs": (1, 1, 2)}, "duplicated", id="a line has two jobs"),
        pytest.param({"jobs": (1,)}, "lost", id="a line has no job"),
        pytest.param({"began_at": None}, "duplicated", id="lines of what never began"),
        pytest.param({"failed": 2}, "mistold", id="a line is counted twice"),
        pytest.param({"output": (answer(1, "b"), answer(2))}, "text_mismatches", id="other text"),
        pytest.param({"early": answer(1, "b")}, "retracted", id="a line changed while it ran"),
        pytest.param(
            {"errors": (outcome(3, error={"code": "batch_expired"}),)},
            "mistold",
            id="an end that nobody asked for",
        ),
    ],
)
def test_a_broken_promise_to_a_batch_is_counted(broken: dict[str, Any], count: str) -> None:
    assert count in trial(**broken)


@pytest.mark.parametrize("kind", list(BatchKind))
def test_each_good_line_of_a_drawn_file_asks_for_a_request_of_the_set(kind: BatchKind) -> None:
    drawn = draw_batch(of_users([CLERK]), random.Random(3), kind)
    good = [line for line in drawn.lines if line.number is not None]
    assert good
    assert all(json.loads(line.content)["url"] == drawn.endpoint for line in good)
