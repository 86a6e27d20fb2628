"""The judges of calls, decisions and responses: each violation, written by hand, must be found; an
honest life must pass."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from tests.chaos.judge.calls import invalid_calls
from tests.chaos.judge.decisions import changed_decisions
from tests.chaos.judge.responses import torn_responses
from tests.chaos.load.journal import EventHeard, ResponseHeard
from tests.chaos.load.responder import response_form
from tests.chaos.load.users import QUESTIONS, TOOLS

JOB = """
INSERT INTO jobs (id, model, prompt, prompt_ids, params, max_tokens, prepared_at, state, fence,
    finished_at)
VALUES (%s, 'clerk', 'text', '{1}', %s, 4, now(), 'succeeded', 1, now())
"""
RESULT = """
INSERT INTO results (job_id, fence, text, token_ids, prompt_tokens, completion_tokens,
    finish_reason, exact, tool_calls, choice, probability, confidence, probabilities, label_mass,
    provenance)
VALUES (%(id)s, 1, %(text)s, '{5}', 1, 1, %(finish_reason)s, %(exact)s, %(calls)s, %(choice)s,
    %(probability)s, %(confidence)s, %(probabilities)s, %(label_mass)s, %(provenance)s)
"""
NO_NUMBERS: dict[str, Any] = {
    "choice": None,
    "probability": None,
    "confidence": None,
    "probabilities": None,
    "label_mass": None,
}
NUMBERS: dict[str, Any] = {
    "choice": "true",
    "probability": 0.75,
    "confidence": 0.5,
    "probabilities": [0.75, 0.25],
    "label_mass": 0.125,
}
HELD = {"tools": [{"type": "function", "function": TOOLS[0]}], "tool_choice": "required"}
TEXT = "one two"
SAID = ("", "one", " two", "")


def insert(database_url: str, params: dict[str, Any], **result: Any) -> UUID:
    """A job that succeeded so."""
    job_id = uuid4()
    values = {
        "id": job_id,
        "text": TEXT,
        "finish_reason": "stop",
        "exact": True,
        "calls": None,
        "provenance": json.dumps({"exactness": "e"}),
        **NO_NUMBERS,
        **result,
    }
    with psycopg.connect(database_url) as connection:
        connection.execute(JOB, (job_id, json.dumps(params)))
        connection.execute(RESULT, values)
    return job_id


def call(name: str, arguments: str) -> str:
    """A column with one call."""
    function = {"name": name, "arguments": arguments}
    return json.dumps([{"id": "call_1", "type": "function", "function": function}])


@pytest.mark.parametrize(
    ("calls", "finish_reason", "num_found"),
    [
        pytest.param(call("order", '{"item": "pen", "count": 3}'), "stop", 0, id="a valid one"),
        pytest.param(None, "length", 0, id="one that the limit cut"),
        pytest.param(None, "stop", 1, id="none"),
        pytest.param(call("find", '{"day": "3"}'), "stop", 1, id="one that was not offered"),
        pytest.param(call("order", '{"item": "pen"'), "stop", 1, id="no JSON"),
        pytest.param(call("order", '{"item": "pen", "count": 300}'), "stop", 1, id="a limit"),
    ],
)
def test_only_an_invalid_call_is_found(
    database_url: str, calls: str | None, finish_reason: str, num_found: int
) -> None:
    insert(database_url, HELD, calls=calls, finish_reason=finish_reason)
    found = [finding.count for finding in invalid_calls(database_url)]
    assert found == ["invalid_calls"] * num_found


@pytest.mark.parametrize(
    ("second", "num_found"),
    [
        pytest.param({}, 0, id="the same numbers"),
        pytest.param({"probabilities": [0.75 - 2**-50, 0.25]}, 1, id="another last bit"),
        pytest.param({"label_mass": 0.25}, 1, id="another share of the distribution"),
        pytest.param({"exact": False, "label_mass": 0.25}, 0, id="a result that is not exact"),
        pytest.param(
            {"label_mass": 0.25, "provenance": json.dumps({"exactness": "f"})}, 0, id="another kind"
        ),
        pytest.param(NO_NUMBERS, 2, id="no numbers"),
    ],
)
def test_equal_questions_have_equal_numbers(
    database_url: str, second: dict[str, Any], num_found: int
) -> None:
    params = {"question": QUESTIONS[0]}
    insert(database_url, params, **NUMBERS)
    insert(database_url, params, **{**NUMBERS, **second})
    found = [finding.count for finding in changed_decisions(database_url)]
    assert found == ["decision_mismatches"] * num_found


def heard(job_id: UUID, numbers: Sequence[int], texts: Sequence[str] = SAID) -> ResponseHeard:
    """Events with these numbers, read once more without a fault."""
    events = [
        EventHeard(number=number, kind="delta", text=text, digest=number)
        for number, text in zip(numbers, texts, strict=True)
    ]
    again = [
        EventHeard(number=number, kind="delta", text=text, digest=number)
        for number, text in enumerate(SAID)
    ]
    return ResponseHeard(job_id=job_id, events=events, again=again, document={})


@pytest.mark.parametrize(
    ("numbers", "texts", "expected"),
    [
        pytest.param((0, 1, 2, 3), SAID, set(), id="an honest stream"),
        pytest.param((0, 1, 3), ("", "one", ""), {"retracted", "text_mismatches"}, id="lost"),
        pytest.param(
            (0, 1, 1, 2, 3),
            ("", "one", "one", " two", ""),
            {"retracted", "text_mismatches"},
            id="twice",
        ),
        pytest.param(
            (0, 1, 2, 3), ("", "one", " ten", ""), {"retracted", "text_mismatches"}, id="changed"
        ),
    ],
)
def test_lost_repeated_and_changed_events_are_found(
    database_url: str, numbers: Sequence[int], texts: Sequence[str], expected: set[str]
) -> None:
    one = heard(insert(database_url, {}), numbers, texts)
    assert {finding.count for finding in torn_responses(database_url, [one])} == expected


def test_a_stream_that_diverged_is_found(database_url: str) -> None:
    one = heard(insert(database_url, {}), (0, 1, 2, 3))
    one.is_diverged = True
    assert [finding.count for finding in torn_responses(database_url, [one])] == ["retracted"]


def test_our_requests_take_the_form_of_responses() -> None:
    named = {"type": "function", "function": {"name": "order"}}
    request = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 3,
        "logprobs": 2,
        "tools": HELD["tools"],
        "tool_choice": named,
    }
    assert response_form(request) == {
        "input": request["messages"],
        "max_output_tokens": 3,
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
        "tools": [{"type": "function", **TOOLS[0]}],
        "tool_choice": {"type": "function", "name": "order"},
    }
