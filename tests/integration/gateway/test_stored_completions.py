"""Stored chat completions, by OpenAI's own client: as they were answered, listed, changed, gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from sqlalchemy import text

from shardline.contract.api_key import bearer
from shardline.store import models
from tests.integration.gateway.running_gateway import PROMPT, make_key
from tests.tiny_head import TinyHead, clerk_row

MESSAGES: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": PROMPT},
]
ROUTE = "/v1/chat/completions"


@pytest.fixture
async def client(http: httpx.AsyncClient) -> AsyncIterator[AsyncOpenAI]:
    key = http.headers["authorization"].removeprefix("Bearer ")
    async with AsyncOpenAI(base_url=f"{http.base_url}/v1/", api_key=key) as client:
        yield client


async def test_a_stored_completion_is_what_was_answered_until_it_is_deleted(
    client: AsyncOpenAI, http: httpx.AsyncClient, head: TinyHead, database_url: str
) -> None:
    chats = client.chat.completions
    fields: Any = {"model": "clerk", "messages": MESSAGES, "metadata": {"order": "7"}}
    with head.serving():
        answers = [
            await chats.create(
                **fields,
                store=True,
                n=2,
                service_tier="flex",
                logprobs=True,
                top_logprobs=2,
            ),
            await chats.create(**fields, store=True),
        ]
        await chats.create(**fields)
    # What was answered comes back, with its metadata
    for answer in answers:
        found = await chats.retrieve(answer.id)
        assert found.model_dump() == {**answer.model_dump(), "metadata": {"order": "7"}}
    # In pages, by model and by metadata
    first_page = await chats.list(limit=1)
    assert [one.id for one in first_page.data] == [answers[0].id]
    assert [one.id async for one in chats.list(limit=1)] == [one.id for one in answers]
    assert [one.id async for one in chats.list(order="desc", model="clerk")] == [
        one.id for one in reversed(answers)
    ]
    changed = await chats.update(answers[1].id, metadata={"order": "8"})
    assert changed.model_dump()["metadata"] == {"order": "8"}
    assert [one.id async for one in chats.list(metadata={"order": "8"})] == [answers[1].id]
    assert [one.id async for one in chats.list(model="other")] == []
    # The messages that it was asked with
    messages = [one async for one in chats.messages.list(answers[0].id, limit=1)]
    assert [(one.role, one.content) for one in messages] == [
        ("system", "Be brief."),
        ("user", PROMPT),
    ]
    assert len({one.id for one in messages}) == 2
    # Of another tenant nothing is found
    with head.database.begin() as connection:
        connection.execute(text("INSERT INTO tenants (id) VALUES ('other')"))
    stranger = bearer(make_key(database_url, tenant="other"))
    for path in (f"{ROUTE}/{answers[0].id}", f"{ROUTE}/{answers[0].id}/messages"):
        assert (await http.get(path, headers=stranger)).status_code == 404
    assert (await http.get(ROUTE, headers=stranger)).json()["data"] == []
    # Deleted it is gone here, and its jobs stay
    assert (await chats.delete(answers[0].id)).deleted
    with pytest.raises(openai.NotFoundError):
        await chats.retrieve(answers[0].id)
    with pytest.raises(openai.NotFoundError):
        await chats.delete(answers[0].id)
    assert [one.id async for one in chats.list()] == [answers[1].id]
    assert (await http.get(f"/v1/jobs/{answers[0].id}")).status_code == 200


async def test_an_answer_names_the_weights_that_made_it_when_its_model_has_others(
    client: AsyncOpenAI, http: httpx.AsyncClient, head: TinyHead
) -> None:
    chats = client.chat.completions
    fields: Any = {"model": "clerk", "messages": MESSAGES, "store": True}
    with head.serving():
        answer = await chats.create(**fields, extra_headers={"Idempotency-Key": "k"})
        assert answer.system_fingerprint == "fp_f1"
        with head.database.begin() as connection:
            models.register_model(connection, {**clerk_row(), "fingerprint": "f2"})
        async with asyncio.timeout(30):
            while '"fp_f2"' not in (await http.get("/v1/models")).text:
                pass
        again = await chats.create(**fields, extra_headers={"Idempotency-Key": "k"})
    assert again.id == answer.id
    for found in (again, await chats.retrieve(answer.id)):
        assert found.system_fingerprint == "fp_f1"


async def test_a_model_that_is_gone_hides_no_completion(
    client: AsyncOpenAI, head: TinyHead
) -> None:
    chats = client.chat.completions
    fields: Any = {"model": "clerk", "messages": MESSAGES, "store": True, "logprobs": True}
    with head.serving():
        answers = [await chats.create(**fields) for _ in range(2)]
    gone, there = answers
    with head.database.begin() as connection:
        rename = text("UPDATE jobs SET model = 'gone' WHERE id = :id")
        connection.execute(rename, {"id": gone.id.removeprefix("chatcmpl-")})
    listed = [one async for one in chats.list()]
    assert [one.id for one in listed] == [gone.id, there.id]
    assert listed[1].choices == there.choices
    (choice,) = listed[0].choices
    assert (listed[0].model, listed[0].usage) == ("gone", gone.usage)
    assert choice.message.content == gone.choices[0].message.content
    assert listed[0].system_fingerprint == gone.system_fingerprint
    assert choice.logprobs is None
    changed = await chats.update(gone.id, metadata={"order": "8"})
    assert changed.choices == [choice]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("order=up", "order"),
        ("after=x", "after"),
        ("after=00000000-0000-0000-0000-000000000000", "after"),
        ("team=red", "team"),
        ("&".join(f"metadata[{key}]=1" for key in range(17)), "metadata"),
        ("metadata[a]=%00", "metadata"),
    ],
)
async def test_a_wrong_list_names_the_parameter(
    http: httpx.AsyncClient, query: str, field: str
) -> None:
    reply = await http.get(f"{ROUTE}?{query}")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize("body", [{}, {"metadata": 5}, {"metadata": {}, "x": 1}, {"metadata": "a"}])
async def test_wrong_metadata_is_refused(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    reply = await http.post(f"{ROUTE}/chatcmpl-{'0' * 8}-0000-0000-0000-{'0' * 12}", json=body)
    assert reply.status_code == 400


async def test_a_name_that_no_completion_has_is_not_found(http: httpx.AsyncClient) -> None:
    body = {"model": "clerk", "messages": MESSAGES}
    reply = await http.post(f"{ROUTE}/input_tokens", json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")
