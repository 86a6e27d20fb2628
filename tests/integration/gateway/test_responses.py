"""Responses by OpenAI's own client: whole, streamed, joined again without gateway and Redis,
cancelled, deleted, gone on with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import redis
from openai import AsyncOpenAI
from sqlalchemy import text

from services.gateway.client import GatewayClient
from shardline.base.errors import Unavailable
from shardline.contract.api_key import bearer
from shardline.contract.job import JobState
from tests.integration.gateway.running_gateway import (
    PROMPT,
    claimed,
    events_of,
    make_key,
    running_gateway,
)
from tests.integration.gateway.test_openai_client import official
from tests.tiny_head import TinyHead

PATH = "/v1/responses"
ASKED: dict[str, Any] = {"model": "clerk", "input": PROMPT}


@pytest.fixture
async def client(http: httpx.AsyncClient) -> AsyncIterator[AsyncOpenAI]:
    async with official(http) as client:
        yield client


async def read(
    http: httpx.AsyncClient, path: str, *, limit: int | None = None, **asked: Any
) -> list[Any]:
    """The data of events, up to `limit` of them or to the end."""
    found: list[Any] = []
    method = "POST" if "json" in asked else "GET"
    async with http.stream(method, path, **asked) as reply:
        assert reply.status_code == 200
        async for event in events_of(reply):
            if event.data != "[DONE]":
                assert event.name == event.data["type"]
                found.append(event.data)
            if len(found) == limit:
                break
    return found


async def rejoined(http: httpx.AsyncClient, response_id: str, after: int | None = None) -> Any:
    query = "" if after is None else f"&starting_after={after}"
    return await read(http, f"{PATH}/{response_id}?stream=true{query}")


async def test_a_whole_answer_has_all_that_openais_client_reads(
    client: AsyncOpenAI, head: TinyHead
) -> None:
    with head.serving():
        answer = await client.responses.create(
            **ASKED,
            instructions="Add.",
            metadata={"order": "17"},
            include=["message.output_text.logprobs"],
            top_logprobs=2,
        )
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.service_tier == "default"
    assert answer.instructions == "Add."
    assert answer.metadata == {"order": "17"}
    (item,) = answer.output
    assert item.type == "message"
    assert item.id == f"msg_{answer.id.removeprefix('resp_')}_0"
    (part,) = item.content
    assert part.type == "output_text"
    assert answer.output_text == part.text != ""
    assert answer.usage is not None
    assert part.logprobs is not None
    assert len(part.logprobs) == answer.usage.output_tokens
    assert {len(entry.top_logprobs) for entry in part.logprobs} == {2}
    again = await client.responses.retrieve(answer.id)
    assert again.to_dict() == answer.to_dict()


async def test_a_stream_is_the_same_with_the_same_numbers_however_it_is_read(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    body = {**ASKED, "stream": True, "include": ["message.output_text.logprobs"]}
    with head.serving():
        found = await read(http, PATH, json=body)
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    kinds = [one["type"].removeprefix("response.") for one in found]
    num_deltas = kinds.count("output_text.delta")
    assert num_deltas > 1
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * num_deltas,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    response_id = found[0]["response"]["id"]
    assert found[-1]["response"] == (await http.get(f"{PATH}/{response_id}")).json()
    assert await rejoined(http, response_id) == found
    for after in (0, 4, len(found) - 2):
        assert await rejoined(http, response_id, after) == found[after + 1 :]


async def test_a_response_in_the_background_is_joined_after_gateway_and_redis_are_gone(
    database_url: str, redis_url: str, head: TinyHead
) -> None:
    asked = {**ASKED, "stream": True, "background": True}
    async with running_gateway(database_url, redis_url) as http:
        reading = asyncio.create_task(read(http, PATH, json=asked, limit=7))
        sequence = await claimed(head)
        head.say(sequence, 4)
        begun = await reading
    head.beat(sequence)
    with redis.Redis.from_url(redis_url) as connection:
        connection.flushall()
    head.say(sequence, len(sequence.output_ids) - sequence.num_said, to_stream=False)
    head.end(sequence, to_stream=False)
    async with running_gateway(database_url, redis_url) as http:
        response_id = begun[0]["response"]["id"]
        rest = await rejoined(http, response_id, begun[-1]["sequence_number"])
        assert [*begun, *rest] == await rejoined(http, response_id)
    assert [one["type"] for one in begun[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert rest[-1]["response"]["status"] == "completed"


async def test_the_next_response_reads_the_conversation_without_its_instructions(
    client: AsyncOpenAI, head: TinyHead, database_url: str, http: httpx.AsyncClient
) -> None:
    with head.serving():
        first = await client.responses.create(**ASKED, instructions="Add.")
        second = await client.responses.create(
            model="clerk",
            input=[{"role": "user", "content": [{"type": "input_text", "text": "sum: 3 ="}]}],
            previous_response_id=first.id,
        )
    assert second.previous_response_id == first.id
    (row,) = [
        row
        for row in head.database.connect().exec_driver_sql("SELECT id, messages FROM jobs")
        if str(row.id) == second.id.removeprefix("resp_")
    ]
    assert [(one["role"], one["content"]) for one in row.messages] == [
        ("user", PROMPT),
        ("assistant", first.output_text),
        ("user", "sum: 3 ="),
    ]
    items = await client.responses.input_items.list(second.id)
    (item,) = items.data
    assert item.to_dict()["content"] == [{"type": "input_text", "text": "sum: 3 ="}]
    other = bearer(make_key(database_url, tenant="other"))
    body = {**ASKED, "previous_response_id": first.id}
    strange = await http.post(PATH, json=body, headers=other)
    assert strange.json()["error"]["code"] == "previous_response_not_found"
    assert (await http.get(f"{PATH}/{first.id}", headers=other)).status_code == 404


async def test_the_input_is_counted_as_it_is_read_and_nothing_is_stored(
    client: AsyncOpenAI, http: httpx.AsyncClient, head: TinyHead
) -> None:
    with head.serving():
        first = await client.responses.create(**ASKED)
        follow: dict[str, Any] = {"model": "clerk", "previous_response_id": first.id}
        follow["input"] = "sum: 123 + 456 ="
        counted = await client.responses.input_tokens.count(**follow)
        jobs = (await http.get("/v1/jobs")).json()["data"]
        second = await client.responses.create(**follow)
    assert first.usage is not None
    assert second.usage is not None
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == second.usage.input_tokens > first.usage.input_tokens
    assert len(jobs) == 1
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.input_tokens.count(model="clerk")
    assert refused.value.param == "input"


async def test_what_is_deleted_or_never_stored_is_not_found(
    client: AsyncOpenAI, head: TinyHead
) -> None:
    with head.serving():
        kept = await client.responses.create(**ASKED)
        hidden = await client.responses.create(**ASKED, store=False)
    assert hidden.output_text == kept.output_text
    await client.responses.delete(kept.id)
    for response_id in (kept.id, hidden.id):
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response_id)
        with pytest.raises(openai.BadRequestError, match="no response has the id"):
            await client.responses.create(**ASKED, previous_response_id=response_id)


async def test_a_cancelled_response_keeps_what_was_said(
    client: AsyncOpenAI, http: httpx.AsyncClient, head: TinyHead
) -> None:
    asked = await client.responses.create(**ASKED, background=True)
    assert asked.status == "queued"
    sequence = await claimed(head)
    head.say(sequence, 3)
    cancelling = asyncio.create_task(client.responses.cancel(asked.id))
    while not head.beat(sequence):
        await asyncio.to_thread(head.wait_for_bell)
    head.end(sequence, JobState.CANCELLED)
    answer = await cancelling
    assert answer.status == "cancelled"
    events = await rejoined(http, asked.id)
    assert (events[-1]["type"], events[-1]["response"]["status"]) == (
        "response.incomplete",
        "cancelled",
    )


async def test_a_failed_response_says_why(client: AsyncOpenAI, head: TinyHead) -> None:
    asking = asyncio.create_task(client.responses.create(**ASKED))
    head.end(await claimed(head), JobState.FAILED)
    answer = await asking
    assert answer.status == "failed"
    assert answer.error is not None
    assert (answer.error.code, "broke the engine" in answer.error.message) == ("server_error", True)


async def test_a_repeat_finds_the_same_response(client: AsyncOpenAI, head: TinyHead) -> None:
    key = {"Idempotency-Key": "order-3"}
    with head.serving():
        first = await client.responses.create(**ASKED, user="a", extra_headers=key)
        again = await client.responses.create(**ASKED, user="b", extra_headers=key)
        await client.chat.completions.create(
            model="clerk",
            messages=[{"role": "user", "content": PROMPT}],
            extra_headers={"Idempotency-Key": "order-4"},
        )
    assert again.to_dict() == first.to_dict()
    with pytest.raises(openai.ConflictError, match="no response"):
        await client.responses.create(**ASKED, extra_headers={"Idempotency-Key": "order-4"})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"conversation": "conv_1"}, "conversation"),
        ({"messages": []}, "messages"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0]"),
        ({"tools": [{"type": "web_search"}, {"type": "unheard", "name": "a"}]}, "tools[1].type"),
        (
            {
                "tools": [
                    {"type": "function", "name": "f"},
                    {
                        "type": "custom",
                        "name": "a",
                        "format": {"type": "grammar", "syntax": "regex", "definition": "("},
                    },
                ]
            },
            "tools[1].format.definition",
        ),
        ({"background": True, "store": False}, "background"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"user": "\0"}, "user"),
        (
            {
                "tools": [
                    {
                        "type": "namespace",
                        "name": "crm",
                        "description": "\0",
                        "tools": [{"type": "function", "name": "f"}],
                    }
                ]
            },
            "tools[0].description",
        ),
        ({"starting_after": 3}, "starting_after"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "3"}]},
            "input",
        ),
    ],
)
async def test_a_wrong_request_is_refused_by_name(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    reply = await http.post(PATH, json={**ASKED, **fields})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].startswith(param)


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"background": True}])
async def test_a_response_that_cannot_be_read_after_its_insert_is_left_to_nobody(
    database_url: str,
    redis_url: str,
    head: TinyHead,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
) -> None:
    async def away(*_: object) -> None:
        raise Unavailable("Postgres is away")

    monkeypatch.setattr(GatewayClient, "response", away)
    async with running_gateway(database_url, redis_url, http_end_wait_s=0.01) as http:
        reply = await http.post(PATH, json={**ASKED, **fields})
        assert reply.status_code == 503
        (job,) = (await http.get("/v1/jobs")).json()["data"]
        assert job["state"] == "cancelled"
        # One that can be asked for again goes on
        kept = await http.post(PATH, json={**ASKED, **fields, "idempotency_key": "k"})
        assert kept.status_code == 503
        assert (await http.get("/v1/jobs")).json()["data"][0]["state"] == "queued"


async def test_a_response_of_a_model_that_is_gone_can_be_deleted(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    stored = (await http.post(PATH, json={**ASKED, "background": True})).json()
    with head.database.begin() as connection:
        connection.execute(text("UPDATE jobs SET model = 'gone'"))
    path = f"{PATH}/{stored['id']}"
    assert (await http.get(path)).status_code == 404
    (item,) = (await http.get(f"{path}/input_items")).json()["data"]
    assert item["content"][0]["text"] == PROMPT
    assert (await http.delete(path)).json()["deleted"]
    (job,) = (await http.get("/v1/jobs")).json()["data"]
    assert job["state"] == "cancelled"


DEEP = {"type": "object", "properties": {"a": {"not": {}}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "word " * 600}, "input"),
        ({"input": [{"role": "assistant", "content": "a"}]}, "input"),
        ({"max_output_tokens": 600}, "max_output_tokens"),
        (
            {
                "text": {
                    "format": {"type": "json_schema", "name": "a", "schema": DEEP, "strict": True}
                }
            },
            "text.format.schema.properties.a",
        ),
        ({"structured_outputs": {"json": DEEP}}, "structured_outputs.json.properties.a"),
    ],
)
async def test_what_a_model_cannot_take_is_named_as_it_was_sent(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    error = (await http.post(PATH, json={**ASKED, **fields})).json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
