"""Anthropic's doors over real HTTP, Postgres and Valkey: answers, events, refusals, and callers who
leave."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from services.gateway import errors
from shardline.contract.api_key import Scope
from shardline.contract.job import JobState
from tests.integration.gateway.api_document import API
from tests.integration.gateway.running_gateway import PROMPT, claimed, events_of, make_key
from tests.integration.gateway.running_gateway import running_gateway as running
from tests.tiny_head import NUM_CACHED, Sequence, TinyHead

MESSAGES = "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"
LOOK = {"name": "look", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "c-1", "name": "look", "input": {}}
FORM = {"type": "json_schema", "schema": {"type": "object"}}
BEGUN = {"role": "assistant", "content": "The answer is"}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}}
CITED = {
    "type": "document",
    "source": {"type": "text", "media_type": "text/plain", "data": "a"},
    "citations": {"enabled": True},
}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
BODY = {
    "model": "clerk",
    "max_tokens": 32,
    "messages": [{"role": "user", "content": PROMPT}],
}


def cut_at_stop(head: TinyHead, job: Sequence) -> None:
    """What a real head would generate of it."""
    row = job.claimed
    completion = head.tokens.completion(row.params, row.max_tokens, row.prompt_ids)
    for num_tokens, token_id in enumerate(job.output_ids, 1):
        reason = completion.push(token_id)[1]
        if reason is not None:
            job.output_ids, job.reason = job.output_ids[:num_tokens], reason
            return


async def test_a_message_has_anthropics_shape_and_a_row(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    with head.serving():
        reply = await http.post(MESSAGES, json={**BODY, "metadata": {"user_id": "u-1"}})
    assert reply.status_code == 200, reply.text
    body = reply.json()
    job_id = body["id"].removeprefix("msg_")
    assert reply.headers["request-id"] == reply.headers["x-request-id"] == body["id"]
    job = (await http.get(f"/v1/jobs/{body['id']}")).json()
    assert (job["id"], job["metadata"], job["priority"]) == (job_id, {"user_id": "u-1"}, 3)
    usage = job["result"]["usage"]
    assert body == {
        "id": f"msg_{job_id}",
        "type": "message",
        "role": "assistant",
        "model": "clerk",
        "content": [{"type": "text", "text": PROMPT}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": usage["prompt_tokens"] - NUM_CACHED,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": NUM_CACHED,
            "output_tokens": usage["completion_tokens"],
        },
    }


async def test_a_stream_has_the_events_of_the_whole_message(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    with head.serving():
        whole = (await http.post(MESSAGES, json=BODY)).json()
        async with http.stream("POST", MESSAGES, json={**BODY, "stream": True}) as reply:
            events = [event async for event in events_of(reply)]
    assert all(event.name == event.data["type"] for event in events)
    names = [event.name for event in events]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    start, end = events[0].data["message"], events[-2].data
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] == whole["usage"]["input_tokens"] + NUM_CACHED
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"] == whole["usage"]
    assert "".join(event.data["delta"]["text"] for event in events[3:-3]) == PROMPT


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "end", "text"),
    [
        ({"stop_sequences": ["no", "2 =", "+ 2"]}, ("stop_sequence", "+ 2"), "sum: 1 "),
        ({"stop_sequences": ["nowhere"]}, ("end_turn", None), PROMPT),
        ({"stop_sequences": ["2"], "max_tokens": 4}, ("max_tokens", None), "sum: 1"),
        ({"max_tokens": 100_000}, ("end_turn", None), PROMPT),
    ],
)
async def test_the_reason_of_an_end_is_the_right_one(
    http: httpx.AsyncClient,
    head: TinyHead,
    fields: dict[str, Any],
    end: tuple[str, str | None],
    text: str,
    *,
    stream: bool,
) -> None:
    asked = {**BODY, **fields, "stream": stream}
    asking = asyncio.create_task(http.post(MESSAGES, json=asked))
    job = await claimed(head)
    cut_at_stop(head, job)
    head.finish(job)
    reply = await asking
    if stream:
        events = [event async for event in events_of(reply)]
        last = events[-2].data["delta"]
        parts = [event.data["delta"] for event in events if event.name == "content_block_delta"]
    else:
        last = reply.json()
        parts = reply.json()["content"]
    assert (last["stop_reason"], last["stop_sequence"]) == end
    assert "".join(part["text"] for part in parts) == text


async def test_an_answer_that_fills_the_context_says_so(
    database_url: str, redis_url: str, head: TinyHead
) -> None:
    chat = {name: BODY[name] for name in ("model", "messages")}
    async with running(database_url, redis_url) as http:
        num_prompt = (await http.post(COUNT, json=chat)).json()["input_tokens"]
    head.ready(kv_tokens=num_prompt + 3)
    async with running(database_url, redis_url) as http:
        with head.serving():
            body = (await http.post(MESSAGES, json={**BODY, "max_tokens": 4_000})).json()
        assert body["stop_reason"] == "model_context_window_exceeded"
        job = (await http.get(f"/v1/jobs/{body['id']}")).json()
    assert job["params"]["max_tokens"] == 4_000
    assert job["result"]["usage"]["completion_tokens"] == 3


async def test_the_system_and_turns_are_rendered_as_a_chat_is(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [{"type": "text", "text": "d"}]},
        {"role": "user", "content": "e"},
    ]
    cached = {"type": "text", "text": "f", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    with head.serving():
        reply = await http.post(MESSAGES, json={**BODY, "system": [cached], "messages": turns})
    assert reply.status_code == 200, reply.text
    chat = [
        {"role": "system", "content": "f"},
        {"role": "user", "content": "a\nb\nc"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    job = (await http.get(f"/v1/jobs/{reply.json()['id']}")).json()
    same = await http.post("/v1/jobs", json={"model": "clerk", "messages": chat})
    other = (await http.get(f"/v1/jobs/{same.json()['id']}")).json()
    assert job["prompt_token_ids"] == other["prompt_token_ids"]


async def test_documents_of_text_and_search_results_are_read_as_text(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    part = {"type": "text", "text": "c", "citations": [{"type": "char_location"}]}
    plain = {"type": "text", "media_type": "text/plain", "data": "b"}
    parts = {"type": "content", "content": [{**part, "later": None}]}
    file = {"type": "document", "source": plain, "title": "a", "citations": {"enabled": False}}
    found = {"type": "search_result", "source": "e", "title": "d", "content": [part]}
    output = [{"type": "document", "source": parts, "context": "f"}, found]
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": [file, part, found]},
        {"role": "assistant", "content": [CALL]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c-1", "content": output}],
        },
    ]
    with head.serving():
        reply = await http.post(MESSAGES, json={**BODY, "messages": turns})
    assert reply.status_code == 200, reply.text
    function = {"name": "look", "arguments": "{}"}
    chat = [
        {"role": "user", "content": "a\nb\nc\nd\ne\nc"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c-1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c-1", "content": "f\nc\nd\ne\nc"},
    ]
    job = (await http.get(f"/v1/jobs/{reply.json()['id']}")).json()
    same = await http.post("/v1/jobs", json={"model": "clerk", "messages": chat})
    other = (await http.get(f"/v1/jobs/{same.json()['id']}")).json()
    assert job["prompt_token_ids"] == other["prompt_token_ids"]


@pytest.mark.parametrize("content", ["The answer is", [{"type": "text", "text": "The answer is"}]])
async def test_an_answer_goes_on_with_the_assistants_last_message(
    http: httpx.AsyncClient, head: TinyHead, content: Any
) -> None:
    chat = [{"role": "user", "content": PROMPT}, BEGUN]
    body = {**BODY, "messages": [chat[0], {**BEGUN, "content": content}]}
    with head.serving():
        reply = await http.post(MESSAGES, json=body)
    assert reply.status_code == 200, reply.text
    job = (await http.get(f"/v1/jobs/{reply.json()['id']}")).json()
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    same = await http.post("/v1/jobs", json={"model": "clerk", "messages": chat, **continued})
    other = (await http.get(f"/v1/jobs/{same.json()['id']}")).json()
    assert job["prompt_token_ids"] == other["prompt_token_ids"]
    counting = {name: body[name] for name in ("model", "messages")}
    counted = await http.post(f"{MESSAGES}/count_tokens", json=counting)
    assert counted.json() == {"input_tokens": len(job["prompt_token_ids"])}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"surprise": 1}, "surprise"),
        ({"stop": ["a"]}, "stop"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"messages": [BEGUN], "tools": [LOOK]}, "with tools no answer goes on"),
        ({"messages": [BEGUN], "thinking": {"type": "adaptive"}}, "with thinking no answer"),
        ({"messages": [BEGUN], "output_config": {"format": FORM}}, "with a format no answer"),
        ({"messages": [{"role": "assistant", "content": [CALL]}]}, "with a call or thoughts"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [PDF]}]}, "source.type: 'base64'"),
        ({"messages": [{"role": "user", "content": [CITED]}]}, "citations.enabled"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ({"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "web_search"),
        ({"tools": [SEARCH, {"name": "a b", "input_schema": {}}]}, "tools[1].name"),
        (
            {
                "tools": [SEARCH, {"name": "a", "input_schema": {"type": 1}}],
                "tool_choice": {"type": "any"},
            },
            "tools[1].input_schema",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)
async def test_a_wrong_request_is_refused_by_name_in_anthropics_form(
    http: httpx.AsyncClient, fields: dict[str, Any], named: str
) -> None:
    reply = await http.post(MESSAGES, json={**BODY, **fields})
    body = reply.json()
    assert (reply.status_code, body["type"]) == (400, "error"), body
    assert body["error"]["type"] == "invalid_request_error"
    assert named in body["error"]["message"]
    assert body["request_id"] == reply.headers["request-id"]


async def test_each_refusal_has_anthropics_status_and_type(
    http: httpx.AsyncClient, head: TinyHead, database_url: str
) -> None:
    reader = {"authorization": f"Bearer {make_key(database_url, scopes=(Scope.READ,))}"}
    expected = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        415: "invalid_request_error",
    }
    found = {
        reply.status_code: reply.json()["error"]["type"]
        for reply in (
            await http.post(MESSAGES, json=BODY, headers={"authorization": "Bearer no"}),
            await http.post(MESSAGES, json=BODY, headers=reader),
            await http.post(MESSAGES, json={**BODY, "model": "other"}),
            await http.post(MESSAGES, content=b"{}", headers={"content-type": "text/plain"}),
        )
    }
    assert found == expected
    assert (await http.get(f"{MESSAGES}/unknown")).json()["type"] == "error"


async def test_a_key_may_come_in_anthropics_header(http: httpx.AsyncClient, head: TinyHead) -> None:
    key = http.headers.pop("authorization").removeprefix("Bearer ")
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
    with head.serving():
        assert (await http.post(MESSAGES, json=BODY, headers=headers)).status_code == 200
    assert (await http.get("/v1/models", headers=headers)).status_code == 200
    assert (await http.get("/v1/models")).status_code == 401
    assert (await http.get("/ready", headers={"x-api-key": "no"})).status_code == 401


async def test_a_failed_job_is_an_error_whole_and_in_a_stream(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    asking = asyncio.create_task(http.post(MESSAGES, json=BODY))
    head.end(await claimed(head), JobState.FAILED)
    reply = await asking
    assert (reply.status_code, reply.json()["error"]["type"]) == (500, "api_error")
    assert reply.headers["x-should-retry"] == "false"
    assert reply.json()["error"]["details"]["error_code"] == "job_failed"

    asking = asyncio.create_task(http.post(MESSAGES, json={**BODY, "stream": True}))
    head.end(await claimed(head), JobState.FAILED)
    last = [event async for event in events_of(await asking)][-1]
    assert (last.name, last.data["error"]["type"]) == ("error", "api_error")


async def test_a_repeat_with_a_key_has_the_same_message(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    key = {"Idempotency-Key": "order-1"}
    with head.serving():
        first = await http.post(MESSAGES, json=BODY, headers=key)
        again = await http.post(MESSAGES, json=BODY, headers=key)
        other = await http.post(MESSAGES, json={**BODY, "max_tokens": 3}, headers=key)
    assert first.json() == again.json()
    assert (other.status_code, other.json()["error"]["type"]) == (409, "conflict_error")


async def test_a_caller_who_leaves_cancels_the_job(http: httpx.AsyncClient, head: TinyHead) -> None:
    async with http.stream("POST", MESSAGES, json={**BODY, "stream": True}):
        job = await claimed(head)
    async with asyncio.timeout(30):
        while not head.beat(job):
            await asyncio.to_thread(head.wait_for_bell)


async def test_counted_tokens_are_those_of_the_answer(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    asked = {**BODY, "system": "Be brief."}
    with head.serving():
        usage = (await http.post(MESSAGES, json=asked)).json()["usage"]
    asked.pop("max_tokens")
    counted = await http.post(COUNT, json=asked)
    assert counted.json() == {"input_tokens": usage["input_tokens"] + NUM_CACHED}
    long = [{"role": "user", "content": PROMPT * 100}]
    assert (await http.post(COUNT, json={**asked, "messages": long})).json()["input_tokens"] > 512
    refused = await http.post(COUNT, json={**asked, "temperature": 0})
    assert (refused.status_code, refused.json()["type"]) == (400, "error")


async def test_a_bug_is_reported_in_anthropics_form(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.routes.messages.counted_request", errors.status_of)
    asked = {name: value for name, value in BODY.items() if name != "max_tokens"}
    reply = await http.post(COUNT, json=asked)
    assert (reply.status_code, reply.json()["error"]["type"]) == (500, "api_error")
    assert reply.json()["request_id"] == reply.headers["request-id"]


async def test_the_description_of_a_text_delta_is_anthropics(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    with head.serving():
        reply = await http.post(MESSAGES, json={**BODY, "stream": True})
    assert b"content_block_delta" in reply.content
    operation = API.find_operation_by_label(f"POST {MESSAGES}")
    assert operation is not None
    whole = httpx.Response(
        reply.status_code,
        headers=reply.headers,
        content=reply.content,
        request=httpx.Request("POST", reply.url),
    )
    whole.elapsed = reply.elapsed
    operation.validate_response(whole)
