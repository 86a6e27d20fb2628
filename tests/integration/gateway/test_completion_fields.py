"""Fields and headers of requests at OpenAI's doors: neutral values, lengths, traces."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from tests.integration.gateway.running_gateway import PROMPT, claimed
from tests.tiny_head import TinyHead

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": PROMPT}]


NEUTRAL: dict[str, Any] = {
    "n": 1,
    "user": "u-1",
    "metadata": {"order": "7"},
    "store": False,
    "logit_bias": {},
    "service_tier": "auto",
    "seed": 3,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "ignore_eos": False,
    "stop_token_ids": [],
    "priority": 2,
    "deadline_s": 60,
    "temperature": None,
    "stop": None,
    "stream_options": None,
}
TEXT_NEUTRAL = {**NEUTRAL, "best_of": 1, "echo": False, "suffix": None, "logprobs": None}
CHAT_NEUTRAL = {
    **NEUTRAL,
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "logprobs": False,
    "modalities": ["text"],
}


@pytest.mark.parametrize(
    ("route", "fields"),
    [(TEXT, {"prompt": PROMPT, **TEXT_NEUTRAL}), (CHAT, {"messages": MESSAGES, **CHAT_NEUTRAL})],
)
async def test_openais_known_fields_are_accepted_at_neutral_values(
    http: httpx.AsyncClient, head: TinyHead, route: str, fields: dict[str, Any]
) -> None:
    with head.serving():
        reply = await http.post(route, json={"model": "clerk", **fields})
    assert reply.status_code == 200, reply.text


async def test_a_job_of_an_old_client_refused_by_a_relay_is_the_callers_error(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    asking = asyncio.create_task(http.post(TEXT, json={"model": "clerk", "prompt": PROMPT}))
    head.refuse(await claimed(head), field="prompt")
    reply = await asking
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")


async def test_a_completion_that_says_no_length_has_16_tokens_or_what_fits(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    with head.serving():
        replies = [
            await http.post(TEXT, json={"model": "clerk", "prompt": prompt, **fields})
            for prompt, fields in (
                ([5] * 40, {}),
                ([5] * 505, {}),
                ([5] * 40, {"min_tokens": 20}),
                ([5] * 40, {"max_tokens": -1}),
            )
        ]
    assert [reply.json()["usage"]["completion_tokens"] for reply in replies] == [16, 7, 20, 40]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (TEXT, {"prompt": [5] * 512}),
        (TEXT, {"prompt": [5] * 500, "max_tokens": 13}),
        (TEXT, {"prompt": "x" * 70_000}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 70_000}]}),
        (CHAT, {"messages": [{"role": "user", "content": "sum: 1 + 2 " * 400}]}),
    ],
)
async def test_an_overflow_of_the_context_has_openais_code_and_words(
    http: httpx.AsyncClient, path: str, fields: dict[str, Any]
) -> None:
    reply = await http.post(path, json={"model": "clerk", **fields})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["type"]) == (
        400,
        "context_length_exceeded",
        "invalid_request_error",
    )
    assert "maximum context length is 512 tokens" in error["message"]


async def test_a_traceparent_header_that_is_none_is_dropped(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    good = f"00-{'a' * 32}-{'b' * 16}-01"
    for header, kept in (
        (good, good),
        ("x" * 300, None),
        ("00-" + "0" * 32 + "-" + "b" * 16 + "-01", None),
    ):
        fields = {"model": "clerk", "prompt": PROMPT}
        reply = await http.post("/v1/jobs", json=fields, headers={"traceparent": header})
        assert reply.status_code == 202
        with head.database.begin() as connection:
            query = text("SELECT traceparent FROM jobs WHERE id = :id")
            assert connection.scalar(query, {"id": reply.json()["id"]}) == kept
