"""Questions at OpenAI's door: one row for each, one answer for each, and refusals that name the
question. A head without a model answers."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import httpx
import pytest
from openai import AsyncOpenAI
from openai.types.decision import (
    AnswerAnswerResourceChoice,
    AnswerAnswerResourcePredicate,
    AnswerAnswerResourceScore,
)
from sqlalchemy import text

from shardline.contract.api_key import bearer
from tests.integration.gateway.running_gateway import make_key
from tests.tiny_head import TinyHead

TICKET = "I was charged twice."
QUESTIONS: tuple[dict[str, Any], ...] = (
    {"type": "predicate", "name": "angry", "instructions": "The customer is angry."},
    {
        "type": "choice",
        "instructions": [{"type": "input_text", "text": "Which team?"}],
        "choices": [{"value": True, "description": "ours"}, {"value": "b"}, {"value": "c"}],
    },
    {"type": "score", "instructions": "Urgent?", "levels": [{"label": "no"}, {"label": "yes"}]},
)
BODY: dict[str, Any] = {"model": "clerk", "input": TICKET, "questions": list(QUESTIONS)}
ROWS = text(
    "SELECT name, type, choice, probability, score, confidence, probabilities, label_mass"
    " FROM decisions WHERE state = 'succeeded' ORDER BY type DESC"
)

CHOICES = text("SELECT id, choice_of, choice_index FROM jobs ORDER BY choice_index")


async def test_openais_client_reads_an_answer_of_each_kind(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    key = http.headers["authorization"].removeprefix("Bearer ")
    with head.serving():
        async with AsyncOpenAI(base_url=f"{http.base_url}/v1/", api_key=key) as client:
            decision = await client.decisions.create(**BODY)

    angry, team, urgent = decision.answers
    assert isinstance(angry, AnswerAnswerResourcePredicate)
    assert angry.name == "angry"
    assert angry.probability == pytest.approx(0.5)
    assert isinstance(team, AnswerAnswerResourceChoice)
    assert team.choice is True
    assert [one.probability for one in team.probabilities] == pytest.approx([0.5, 0.25, 0.25])
    assert team.confidence == pytest.approx(0.25)
    assert isinstance(urgent, AnswerAnswerResourceScore)
    assert urgent.score == pytest.approx(0.5)
    assert decision.usage.output_tokens == 3


async def test_rows_have_the_numbers_in_columns(http: httpx.AsyncClient, head: TinyHead) -> None:
    with head.serving():
        answer = await http.post("/v1/decisions", json=BODY)
    assert answer.status_code == 200, answer.text
    with head.database.connect() as connection:
        score, predicate, choice = connection.execute(ROWS).all()
    assert (predicate.name, predicate.probability) == ("angry", pytest.approx(0.5))
    assert (choice.name, choice.choice) == (None, "true")
    assert choice.probabilities == pytest.approx([0.5, 0.25, 0.25])
    assert score.score == pytest.approx(0.5)
    assert score.label_mass == pytest.approx(1.0)

    job = (await http.get(f"/v1/jobs/{answer.json()['answers'][1]['job_id']}")).json()
    assert job["params"]["question"]["type"] == "choice"
    assert job["result"]["decision"]["choice"] == "true"


async def test_a_repeat_with_the_key_has_the_same_jobs_and_another_body_is_a_conflict(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    headers = {"Idempotency-Key": "once"}
    with head.serving():
        first = await http.post("/v1/decisions", json=BODY, headers=headers)
        again = await http.post("/v1/decisions", json=BODY, headers=headers)
    assert first.status_code == 200, first.text
    assert first.json()["answers"] == again.json()["answers"]
    assert first.json()["id"] == again.json()["id"]
    last, *_ = reversed(QUESTIONS)
    for change in (
        {"input": "x"},
        {"questions": [*QUESTIONS[:2], {**last, "instructions": "Late?"}]},
        {"questions": QUESTIONS[:2]},
    ):
        other = await http.post("/v1/decisions", json={**BODY, **change}, headers=headers)
        assert other.status_code == 409, change


async def test_the_questions_of_a_request_are_its_choices(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    with head.serving():
        answer = (await http.post("/v1/decisions", json=BODY)).json()
    ids = [UUID(one["job_id"]) for one in answer["answers"]]
    assert answer["id"] == f"decision-{ids[0]}"
    with head.database.connect() as connection:
        found = connection.execute(CHOICES).all()
    assert [tuple(row) for row in found] == [(job_id, ids[0], at) for at, job_id in enumerate(ids)]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"questions": []}, "questions"),
        ({"questions": [QUESTIONS[0]] * 401}, "questions"),
        ({"input": ""}, "input"),
        ({"input": [{"type": "function_call", "call_id": "1"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": "1 " * 600}, "input"),
        ({"temperature": 0.5}, "temperature"),
        ({"questions": [{**QUESTIONS[1], "choices": ["a", "b", "a"]}]}, "questions[0].choices[2]"),
        (
            {"questions": [QUESTIONS[0], {**QUESTIONS[1], "choices": [f"{n}" for n in range(99)]}]},
            "questions[1]",
        ),
    ],
)
async def test_what_cannot_be_asked_is_refused_by_name_and_stores_nothing(
    http: httpx.AsyncClient, head: TinyHead, changes: dict[str, Any], field: str
) -> None:
    answer = await http.post("/v1/decisions", json={**BODY, **changes})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    with head.database.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM jobs")) == 0


async def test_completions_name_the_door_of_questions(http: httpx.AsyncClient) -> None:
    body = {"model": "clerk", "prompt": TICKET, "question": QUESTIONS[0]}
    answer = await http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "question")


async def test_a_key_that_may_only_read_asks_nothing(
    http: httpx.AsyncClient, database_url: str
) -> None:
    reader = make_key(database_url, scopes=("read",))
    answer = await http.post("/v1/decisions", json=BODY, headers=bearer(reader))
    assert answer.status_code == 403
