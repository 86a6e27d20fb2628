"""The API as its description has it: requests drawn from the description, and every answer held to
it.

Each route gets requests that are valid by the description, with and without what makes them
succeed, and requests that are not. The examples are the same in every run.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from tests.integration.gateway.api_document import API, LABELS
from tests.integration.gateway.route_requests import (
    ASKED,
    BULK_BODIES,
    DECISIONS,
    ENCODERS,
    PAUSE,
    content_of,
    schedule_body,
    webhook_body,
)
from tests.integration.gateway.running_gateway import (
    BATCHES,
    FILES,
    PAUSES,
    PROMPT,
    SCHEDULES,
    WEBHOOKS,
    one_of_each,
    running_gateway,
)
from tests.tiny_head import TinyHead

NUM_EXAMPLES = 8
TIMEOUT_S = 60
HELD_TO: list[Any] = CHECKS.get_by_names(
    [
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
        "negative_data_rejection",
    ]
)
ANYTHING_GOES = {
    "/health",
    "/ready",
    "/v1/models",
    "/v1/models/{name}",
    "/metrics",
    "/openapi.json",
    "/version",
    "/v1/webhook_event_types",
    f"GET {PAUSES}",
}
"""Paths and labels of routes without a parameter that could be wrong."""

FORMS = (f"POST {FILES}",)
"""Operations whose fields are sent as texts: what is none becomes one on its way."""

NOBODY_ENDS = ("delay_s", "deadline_s")
"""Without a relay nobody ends what never starts: who asks for a completion would wait for ever."""

OTHER_BODIES: dict[str, Any] = {
    "/detokenize": {"model": "clerk", "tokens": [5, 6]},
    "/v1/responses": {"model": "clerk", "input": PROMPT, "temperature": 0},
    "/v1/responses/input_tokens": {"model": "clerk", "input": PROMPT, "temperature": 0},
    DECISIONS: ASKED,
    **ENCODERS,
    **BULK_BODIES,
    "/v1/chat/completions/{completion_id}": {"metadata": {"a": "b"}},
    FILES: {"file": "{}", "purpose": "batch"},
    PAUSES: PAUSE,
    SCHEDULES: schedule_body(SCHEDULES),
    f"{SCHEDULES}/{{schedule_id}}": schedule_body(f"{SCHEDULES}/a"),
    WEBHOOKS: webhook_body(WEBHOOKS),
    **{
        f"{WEBHOOKS}/{{webhook_endpoint_id}}{part}": webhook_body(f"{WEBHOOKS}/a{part}")
        for part in ("", "/rotate_secret", "/test", "/replay")
    },
}
"""Bodies of routes that take neither a prompt nor messages."""

NEEDED: dict[str, Any] = {"/v1/messages": {"max_tokens": 8}}
"""Fields beside them."""

RULES = (
    "tenant",
    "min_tokens",
    "max_tokens",
    "max_completion_tokens",
    "stop_token_ids",
    "stream_options",
    "top_logprobs",
    "flexible",
    "tool_choice",
    "depends_on",
    "on_parent_failure",
    "retry",
)
"""Fields that have limits which types cannot say."""


@pytest.mark.parametrize("label", LABELS)
async def test_each_answer_is_as_the_api_describes(
    database_url: str, redis_url: str, head: TinyHead, label: str
) -> None:
    async with running_gateway(database_url, redis_url) as http:
        known = await one_of_each(http, head)
        with head.serving(), session(dict(http.headers)) as caller:
            statuses = await asyncio.to_thread(explore, label, caller, str(http.base_url), known)
    least, most = (400, 401) if label.removeprefix("POST ") in ENCODERS else (200, 300)
    assert any(least <= status < most for status in statuses), f"nothing succeeded: {statuses}"
    assert not {408, 413, 415, 421, 429} & set(statuses), statuses


@contextmanager
def session(headers: dict[str, str]) -> Iterator[requests.Session]:
    """Connections that are used again."""
    with requests.Session() as caller:
        caller.headers.update({"Authorization": headers["authorization"]})
        yield caller


def explore(
    label: str, caller: requests.Session, address: str, known: dict[str, str]
) -> Counter[int]:
    """How many answers there were of each status."""
    operation = API.find_operation_by_label(label)
    assert operation is not None
    statuses: Counter[int] = Counter()
    batch = content_of(BATCHES, known["file_id"])["json"]
    others = {**OTHER_BODIES, BATCHES: batch}
    named = {name: value for name, value in known.items() if f"{{{name}}}" in label}

    def send(prepare: Callable[[Any], object], mode: GenerationMode, **fixed: Any) -> None:
        @settings(max_examples=NUM_EXAMPLES)
        @given(case=operation.as_strategy(generation_mode=mode, **fixed))
        def one(case: schemathesis.Case[Any]) -> None:
            if isinstance(case.body, dict):
                prepare(case.body)
                if prepare is succeed:
                    case.body = others.get(operation.path, case.body)
                    case.body |= NEEDED.get(operation.path, {})
            response = case.call(base_url=address, session=caller, timeout=TIMEOUT_S)
            statuses[response.status_code] += 1
            case.validate_response(response, checks=HELD_TO)

        one()

    send(succeed, GenerationMode.POSITIVE, **({"path_parameters": named} if named else {}))
    send(start, GenerationMode.POSITIVE)
    if ANYTHING_GOES.isdisjoint((operation.path, label)) and label not in FORMS:
        send(start, GenerationMode.NEGATIVE)
    return statuses


def start(body: dict[str, Any]) -> None:
    """Nothing of it waits for a time."""
    for name in NOBODY_ENDS:
        body.pop(name, None)


def succeed(body: dict[str, Any]) -> None:
    """A model that exists, a prompt that it can take, and the rest as it was drawn."""
    start(body)
    for name in RULES:
        body.pop(name, None)
    body["model"] = "clerk"
    if "messages" in body and "prompt" not in body:
        body["messages"] = [{"role": "user", "content": PROMPT}]
    else:
        body["prompt"] = PROMPT
        body.pop("messages", None)
