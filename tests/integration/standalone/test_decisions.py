"""Questions to a model with trained weights behind the whole service: the same probabilities at
every door, from one SQL statement, and after a stage was killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any
from uuid import uuid4

import httpx
import msgspec
import psutil
import pytest
import redis
import torch
import transformers as tf
from openai import BadRequestError, OpenAI
from openai.types.decision import (
    AnswerAnswerResourceChoice,
    AnswerAnswerResourcePredicate,
    AnswerAnswerResourceScore,
)
from sqlalchemy import Engine, text

from services.stage.model.model_info import ModelInfo
from shardline.client import Client
from shardline.contract import keys
from shardline.contract.api_key import bearer
from shardline.contract.decision import Question
from shardline.contract.job import SamplingParams
from shardline_server.tokenize import Tokens
from tests.polling import until
from tests.real_model import NAME, real_model
from tests.stack import Stack

MOST_WRONG = 1e-3
TICKETS = (
    "I was charged twice this month. I want my money back!",
    "The app crashes whenever I open the settings.",
    "Thank you, the new version is great.",
)
QUESTIONS: tuple[dict[str, Any], ...] = (
    {"type": "predicate", "name": "angry", "instructions": "The customer is angry."},
    {
        "type": "choice",
        "name": "queue",
        "instructions": "Which team should answer?",
        "choices": [{"value": "billing"}, {"value": "technical", "description": "errors"}],
    },
    {
        "type": "score",
        "name": "urgency",
        "instructions": "How urgent is it?",
        "levels": [{"label": "low"}, {"label": "normal"}, {"label": "high"}],
    },
)
CLASSIFY = text("""
INSERT INTO jobs (model, prompt, params, metadata)
SELECT :model, tickets.body, jsonb_build_object('question', question),
    jsonb_build_object('ticket', tickets.id)
FROM tickets CROSS JOIN jsonb_array_elements(CAST(:questions AS jsonb)) AS question
""")
ANSWERS = text("""
SELECT metadata ->> 'ticket' AS ticket,
    max(probability) FILTER (WHERE name = 'angry') AS angry,
    max(choice) FILTER (WHERE name = 'queue') AS queue,
    max(score) FILTER (WHERE name = 'urgency') AS urgency,
    bool_and(state = 'succeeded') AS is_whole
FROM decisions WHERE metadata ? 'ticket' GROUP BY 1 ORDER BY 1
""")


@pytest.fixture(scope="module")
def stack(real_stack: Stack) -> Stack:
    return real_stack


@pytest.fixture(scope="module")
def expected(reference: tf.PreTrainedModel) -> Callable[[str, int], list[float]]:
    """By transformers, alone: of a ticket and the place of a question."""
    tokens = Tokens.from_row(ModelInfo.read(real_model()).row(name=NAME, fingerprint="w"))

    @cache
    def probabilities(ticket: str, place: int) -> list[float]:
        question = msgspec.convert(QUESTIONS[place], Question)
        ids = tokens.prepare(prompt=ticket, params=SamplingParams(question=question)).prompt_ids
        labels = [label.token_id for label in tokens.question_labels.of(question)]
        with torch.inference_mode():
            logits = reference(torch.tensor([ids])).logits[0, -1].double()
        found: list[float] = logits[labels].softmax(0).tolist()
        return found

    return probabilities


def test_openais_client_gets_the_probabilities_of_transformers(
    openai: OpenAI, expected: Callable[[str, int], list[float]]
) -> None:
    body: dict[str, Any] = {"model": NAME, "input": TICKETS[0], "questions": QUESTIONS}
    decision = openai.decisions.create(**body)

    angry, queue, urgency = decision.answers
    assert isinstance(angry, AnswerAnswerResourcePredicate)
    assert angry.name == "angry"
    assert angry.probability == pytest.approx(expected(TICKETS[0], 0)[0], abs=MOST_WRONG)
    assert isinstance(queue, AnswerAnswerResourceChoice)
    of_teams = [one.probability for one in queue.probabilities]
    assert of_teams == pytest.approx(expected(TICKETS[0], 1), abs=MOST_WRONG)
    assert queue.choice == ("billing", "technical")[of_teams.index(max(of_teams))]
    assert isinstance(urgency, AnswerAnswerResourceScore)
    of_levels = [one.probability for one in urgency.probabilities]
    assert of_levels == pytest.approx(expected(TICKETS[0], 2), abs=MOST_WRONG)
    assert urgency.score == pytest.approx(of_levels[1] + 2 * of_levels[2])
    assert [one.value for one in urgency.probabilities] == [0, 1, 2]
    assert decision.usage.output_tokens == len(QUESTIONS)


def test_one_statement_classifies_a_table(
    database: Engine, client: Client, expected: Callable[[str, int], list[float]]
) -> None:
    with database.begin() as connection:
        connection.execute(text("CREATE TABLE tickets (id text PRIMARY KEY, body text)"))
        rows = [{"id": str(place), "body": body} for place, body in enumerate(TICKETS)]
        connection.execute(text("INSERT INTO tickets VALUES (:id, :body)"), rows)
        connection.execute(CLASSIFY, {"model": NAME, "questions": json.dumps(QUESTIONS)})

    def answers() -> list[Any]:
        with database.begin() as connection:
            return list(connection.execute(ANSWERS))

    until(lambda: all(row.is_whole for row in answers()))
    for row, ticket in zip(answers(), TICKETS, strict=True):
        by_client = client.decide(NAME, ticket, QUESTIONS, timeout_s=120)
        assert row.angry == by_client[0].probability
        assert row.queue == by_client[1].choice
        assert row.urgency == by_client[2].score
        assert row.angry == pytest.approx(expected(ticket, 0)[0], abs=MOST_WRONG)


def test_a_stream_entry_asks_a_question(
    stack: Stack, client: Client, expected: Callable[[str, int], list[float]]
) -> None:
    job_id = uuid4()
    request = {"id": str(job_id), "model": NAME, "prompt": TICKETS[1], "question": QUESTIONS[1]}
    with redis.Redis.from_url(stack.urls["redis"]) as producer:
        producer.xadd(keys.INTAKE, {"request": json.dumps(request)})
    until(lambda: bool(client.get_many([job_id])))

    result = client.wait(job_id, timeout_s=120).result

    assert result is not None
    assert result.decision is not None
    assert result.decision.probabilities == pytest.approx(expected(TICKETS[1], 1), abs=MOST_WRONG)
    assert result.finish_reason == "stop"


def test_a_repeat_with_the_same_key_asks_nothing_again(stack: Stack) -> None:
    body = {"model": NAME, "input": TICKETS[2], "questions": list(QUESTIONS)}
    headers = {**bearer(stack.urls["api_key"]), "Idempotency-Key": "once"}
    url = f"{stack.urls['gateway']}/v1/decisions"
    first, again = (httpx.post(url, json=body, headers=headers, timeout=120) for _ in range(2))
    assert first.status_code == again.status_code == 200, first.text
    assert first.json()["answers"] == again.json()["answers"]
    other = httpx.post(url, json={**body, "input": "other"}, headers=headers, timeout=120)
    assert other.status_code == 409


def test_a_conversation_of_parts_is_asked_about(openai: OpenAI) -> None:
    talk = [
        {"role": "system", "content": "You sort mails."},
        {"role": "user", "content": [{"type": "input_text", "text": TICKETS[0]}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Noted."}]},
        {"role": "user", "content": [{"type": "input_json", "data": {"plan": "pro"}}]},
    ]
    body: dict[str, Any] = {"model": NAME, "input": talk, "questions": QUESTIONS[:1]}
    decision = openai.decisions.create(**body)
    (answer,) = decision.answers
    assert isinstance(answer, AnswerAnswerResourcePredicate)
    assert 0 < answer.probability < 1


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
        ({"temperature": 0.5}, "temperature"),
        ({"input": "long " * 9000}, "input"),
        (
            {"questions": [{**QUESTIONS[1], "choices": [{"value": "a"}, {"value": "a"}]}]},
            "questions[0].choices[1]",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(
    openai: OpenAI, changes: dict[str, Any], field: str
) -> None:
    body = {"model": NAME, "input": TICKETS[0], "questions": list(QUESTIONS), **changes}
    with pytest.raises(BadRequestError) as refused:
        openai.post("/decisions", body=body, cast_to=object)
    assert refused.value.param == field


def test_numbers_are_the_same_after_a_stage_was_killed(stack: Stack, client: Client) -> None:
    calm = [client.decide(NAME, ticket, QUESTIONS, timeout_s=120) for ticket in TICKETS]
    requests = [
        {"model": NAME, "prompt": ticket, "question": question}
        for ticket in TICKETS * 20
        for question in QUESTIONS
    ]
    ids = client.submit_many(requests)
    stages = [pid for name, pid in stack.look()["processes"].items() if "stage" in name]
    until(lambda: any(job.result for job in client.get_many(ids)))
    for pid in stages:
        psutil.Process(pid).kill()

    jobs = client.wait(ids, timeout_s=400)

    found = [job.result.decision for job in jobs if job.result is not None]
    assert found == [one for decisions in calm * 20 for one in decisions]
