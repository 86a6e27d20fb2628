"""What clients of others send beside their users' requests: fields that are null at any depth, what
an answer held, conversations and tools that a server is to have, formats beside calls that must be
made."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic, beta_async_tool
from openai import AsyncOpenAI
from sqlalchemy import text

from shardline.contract.job import JobState
from tests.integration.gateway.running_gateway import PROMPT
from tests.tiny_head import TinyHead

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
USER = {"role": "user", "content": PROMPT}
SCHEMA = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTION = {"name": "look", "parameters": SCHEMA}
CALL = {"id": "c-1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}

NULLS = [
    {**USER, "name": None, "later": None},
    {"role": "assistant", "content": None, "later": None, "tool_calls": [{**CALL, "later": None}]},
    {"role": "tool", "tool_call_id": "c-1", "content": [{"type": "text", "text": "a", "id": None}]},
]
BLOCKS: list[Any] = [
    {"role": "user", "content": [{"type": "text", "text": PROMPT, "later": None}]},
    {
        "role": "assistant",
        "content": [
            {"type": "tool_use", "id": "c-1", "name": "look", "input": {"a": None}, "later": None}
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "c-1",
                "later": None,
                "content": [{"type": "text", "text": "a", "citations": None, "later": None}],
            }
        ],
    },
]
TOOL = {"type": "function", "function": {**FUNCTION, "strict": None}, "later": None}
MARKED = {"type": "function", "function": FUNCTION, "cache_control": {"type": "ephemeral"}}
ANTHROPICS = {"name": "look", "input_schema": SCHEMA}
DIRECT = {**ANTHROPICS, "defer_loading": False, "allowed_callers": ["direct"]}
CACHED = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "scope": "global"}}
ECHOED = {
    "role": "assistant",
    "content": "a",
    "id": "m-1",
    "parsed": {"a": 1},
    "provider_specific_fields": {"refusal": None, "citations": []},
}


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (CHAT, {"messages": NULLS, "tools": [TOOL]}),
        (MESSAGES, {"messages": BLOCKS, "tools": [ANTHROPICS], "max_tokens": 64}),
        (RESPONSES, {"input": [{**USER, "later": None}], "text": {"format": None}}),
    ],
)
async def test_a_null_at_any_depth_is_left_out(
    http: httpx.AsyncClient, head: TinyHead, route: str, fields: dict[str, Any]
) -> None:
    with head.serving():
        reply = await http.post(route, json={"model": "clerk", **fields})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (CHAT, {"messages": [USER, ECHOED, USER], "tools": [MARKED]}),
        (MESSAGES, {"messages": [USER], "tools": [DIRECT], "system": [CACHED], "max_tokens": 64}),
    ],
)
async def test_what_clients_add_for_themselves_is_left_out(
    http: httpx.AsyncClient, head: TinyHead, route: str, fields: dict[str, Any]
) -> None:
    with head.serving():
        reply = await http.post(route, json={"model": "clerk", **fields})
    assert reply.status_code == 200, reply.text


async def test_a_key_that_is_null_leaves_that_of_the_header(http: httpx.AsyncClient) -> None:
    body = {"model": "clerk", "prompt": PROMPT, "idempotency_key": None}
    told = [
        await http.post("/v1/jobs", json=body, headers={"Idempotency-Key": "one"}) for _ in "ab"
    ]
    assert told[0].status_code == 202
    assert told[0].json()["id"] == told[1].json()["id"]


async def test_a_list_in_a_query_repeats_its_name(http: httpx.AsyncClient) -> None:
    included = (("include[]", "reasoning.encrypted_content"), ("include[]", "web_search"))
    nobodys = "/v1/responses/resp_00000000-0000-0000-0000-000000000000"
    assert (await http.get(nobodys, params=included)).status_code == 404
    twice = (("stream", "true"), ("stream", "true"))
    assert (await http.get(nobodys, params=twice)).status_code == 400


async def test_a_model_that_cannot_be_read_hides_no_other(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    with head.database.begin() as connection:
        connection.execute(text("CREATE TEMP TABLE copied AS TABLE models"))
        connection.execute(text("UPDATE copied SET name = 'broken', tokenizer = '{'"))
        connection.execute(text("INSERT INTO models TABLE copied"))
    listed = (await http.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["clerk"]
    assert (await http.get("/v1/models/broken")).status_code == 400


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (
            CHAT,
            {
                "messages": [USER],
                "tools": [{"type": "function", "function": FUNCTION}],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
        ),
        (
            RESPONSES,
            {
                "input": PROMPT,
                "tools": [{"type": "function", **FUNCTION}],
                "tool_choice": {"type": "function", "name": "look"},
                "text": {"format": {**FORMAT, "name": "a"}},
                "background": True,
            },
        ),
        (
            MESSAGES,
            {
                "messages": [USER],
                "tools": [{"name": "look", "input_schema": SCHEMA}],
                "tool_choice": {"type": "any"},
                "output_config": {"format": FORMAT},
                "max_tokens": 64,
            },
        ),
    ],
)
async def test_a_format_beside_a_call_that_must_be_made_has_no_effect(
    http: httpx.AsyncClient, head: TinyHead, route: str, fields: dict[str, Any]
) -> None:
    with head.serving():
        reply = await http.post(route, json={"model": "clerk", **fields})
    assert reply.status_code == 200, reply.text
    job = (await http.get(f"/v1/jobs/{reply.json()['id']}")).json()
    assert ("structured_outputs" in job["params"], len(job["params"]["tools"])) == (False, 1)


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (
            RESPONSES,
            {
                "input": PROMPT,
                "tools": [
                    {"type": "web_search", "external_web_access": False},
                    {"type": "function", **FUNCTION},
                    {"type": "mcp", "server_label": "a", "server_url": "https://a.example"},
                ],
                "include": ["web_search_call.action.sources", "file_search_call.results"],
            },
        ),
        (
            MESSAGES,
            {
                "messages": [USER],
                "tools": [{"type": "web_search_20250305", "name": "web_search"}, ANTHROPICS],
                "max_tokens": 64,
            },
        ),
    ],
)
async def test_tools_that_a_server_is_to_run_are_left_out(
    http: httpx.AsyncClient, head: TinyHead, route: str, fields: dict[str, Any]
) -> None:
    with head.serving():
        reply = await http.post(route, json={"model": "clerk", **fields})
    assert reply.status_code == 200, reply.text
    job = (await http.get(f"/v1/jobs/{reply.json()['id']}")).json()
    assert [tool["function"]["name"] for tool in job["params"]["tools"]] == ["look"]
    assert [tool["name"] for tool in reply.json().get("tools", [{"name": "look"}])] == ["look"]


async def test_anthropics_runner_of_tools_goes_on_without_a_thread(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    @beta_async_tool
    async def look(place: str) -> str:
        """Look somewhere."""
        return place

    key = http.headers["authorization"].removeprefix("Bearer ")
    asked: dict[str, Any] = {"model": "clerk", "max_tokens": 64, "messages": [USER]}
    async with AsyncAnthropic(base_url=str(http.base_url), api_key=key) as client:
        with head.serving():
            runner = client.beta.messages.tool_runner(
                **asked,
                tools=[look],
                context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            )
            (message,) = [message async for message in runner]
    assert (message.stop_reason, message.role) == ("max_tokens", "assistant")
    refused = await http.post(MESSAGES, json={**asked, "thread": {"type": "create"}})
    error = refused.json()["error"]
    details = {"error_code": "thread_unsupported_request", "param": "thread"}
    assert (refused.status_code, error["details"]) == (400, details)


async def test_an_echo_without_a_token_is_the_prompt_alone(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    key = http.headers["authorization"].removeprefix("Bearer ")
    async with AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key=key) as client:
        with head.serving():
            answer = await client.completions.create(
                model="clerk", prompt=PROMPT, max_tokens=0, echo=True, n=2
            )
    assert [choice.text for choice in answer.choices] == [PROMPT, PROMPT]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    jobs = (await http.get("/v1/jobs")).json()["data"]
    assert {job["state"] for job in jobs[:2]} == {JobState.SUCCEEDED}
    refused = {"model": "clerk", "prompt": PROMPT, "max_tokens": 0, "echo": True, "stream": True}
    assert (await http.post("/v1/completions", json=refused)).json()["error"]["param"] == "stream"


async def test_a_method_without_a_route_has_a_code(http: httpx.AsyncClient) -> None:
    answer = await http.put(CHAT, json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
    compact = await http.post("/v1/responses/compact", json={})
    assert compact.json()["error"]["message"].startswith("POST /v1/responses/compact: ")
    nowhere = await http.get(f"/v1/%ff%ed%a0%80{'x' * 4000}")
    assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, "not_found")
    assert len(nowhere.json()["error"]["message"]) < 300


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/files/file-x"),
        ("GET", "/v1/files/x/content"),
        ("DELETE", "/v1/files/file-x"),
        ("GET", "/v1/batches/batch_x"),
        ("POST", "/v1/batches/batch_x/cancel"),
        ("GET", "/v1/chat/completions/chatcmpl-x"),
        ("GET", "/v1/chat/completions/chatcmpl-x/messages"),
        ("DELETE", "/v1/chat/completions/chatcmpl-x"),
        ("GET", "/v1/responses/resp_x"),
        ("DELETE", "/v1/responses/resp_x"),
        ("POST", "/v1/responses/resp_x/cancel"),
        ("GET", "/v1/responses/resp_x/input_items"),
    ],
)
async def test_an_id_that_nothing_can_have_is_not_found(
    http: httpx.AsyncClient, method: str, path: str
) -> None:
    answer = await http.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
