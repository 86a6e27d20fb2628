"""Anthropic's own Python client at our doors: answers, streams, counts, models, each class of
error, retries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import anthropic
import httpx
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import MessageParam, TextBlock

from shardline.contract.job import JobState
from tests.integration.gateway.running_gateway import PROMPT, claimed, running_gateway, until_shown
from tests.tiny_head import TinyHead

MESSAGES: list[MessageParam] = [{"role": "user", "content": PROMPT}]


@pytest.fixture
async def client(http: httpx.AsyncClient) -> AsyncIterator[AsyncAnthropic]:
    async with official(http) as client:
        yield client


def official(http: httpx.AsyncClient) -> AsyncAnthropic:
    """Anthropic's client with the same key in a header of its own; it repeats twice by itself, as
    users have it."""
    key = http.headers["authorization"].removeprefix("Bearer ")
    return AsyncAnthropic(base_url=str(http.base_url), api_key=key)


async def test_the_client_reads_a_message_and_counts_its_tokens(
    client: AsyncAnthropic, head: TinyHead
) -> None:
    counted = await client.messages.count_tokens(model="clerk", messages=MESSAGES)
    with head.serving():
        answer = await client.messages.create(
            model="clerk", messages=MESSAGES, max_tokens=64, stop_sequences=["nowhere"]
        )
    (block,) = answer.content
    assert isinstance(block, TextBlock)
    assert (block.text, answer.stop_reason, answer.role) == (PROMPT, "end_turn", "assistant")
    assert answer._request_id == answer.id
    usage = answer.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens


async def test_a_stream_makes_the_same_message(client: AsyncAnthropic, head: TinyHead) -> None:
    with head.serving():
        async with client.messages.stream(
            model="clerk", messages=MESSAGES, max_tokens=64
        ) as stream:
            pieces = [text async for text in stream.text_stream]
            streamed = await stream.get_final_message()
        whole = await client.messages.create(model="clerk", messages=MESSAGES, max_tokens=64)
    assert "".join(pieces) == PROMPT
    assert streamed.usage == whole.usage
    assert streamed.stop_reason == "end_turn"
    assert [block.to_dict() for block in streamed.content] == [
        block.to_dict() for block in whole.content
    ]


async def test_each_wrong_request_raises_its_class(client: AsyncAnthropic, head: TinyHead) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature") as wrong:
        await client.messages.create(
            model="clerk", messages=MESSAGES, max_tokens=4, extra_body={"temperature": 1.5}
        )
    assert (wrong.value.type, wrong.value.error_code) == ("invalid_request_error", "invalid_value")
    assert wrong.value.request_id
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await client.messages.create(model="other", messages=MESSAGES, max_tokens=4)
    assert (unknown.value.type, unknown.value.error_code) == (
        "not_found_error",
        "model_not_found",
    )
    with pytest.raises(anthropic.AuthenticationError):
        await client.with_options(api_key="sk-wrong").models.list()
    # The installed client may want less of a model than its newest version does.
    (model,) = [model async for model in client.models.list()]
    assert (model.id, model.type, model.display_name) == ("clerk", "model", "clerk")
    assert int(model.created_at.timestamp()) == model.to_dict()["created"]
    assert await client.models.retrieve("clerk") == model


async def test_errors_of_models_have_the_form_of_the_client_that_asks(
    client: AsyncAnthropic, http: httpx.AsyncClient, head: TinyHead
) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.models.retrieve("nobody")
    assert isinstance(missing.value.body, dict)
    assert missing.value.body["type"] == "error"
    assert missing.value.body["error"]["type"] == "not_found_error"
    assert missing.value.request_id == missing.value.body["request_id"]
    with pytest.raises(anthropic.AuthenticationError) as unknown:
        await client.with_options(api_key="sk-wrong").models.list()
    assert isinstance(unknown.value.body, dict)
    assert unknown.value.body["error"]["type"] == "authentication_error"
    openais = (await http.get("/v1/models/nobody")).json()
    assert openais["error"]["code"] == "model_not_found"
    assert openais.keys() == {"error"}


async def test_the_client_raises_when_a_streamed_job_fails(
    client: AsyncAnthropic, head: TinyHead
) -> None:
    stream = await client.messages.create(
        model="clerk", messages=MESSAGES, max_tokens=64, stream=True
    )
    sequence = await claimed(head)
    head.say(sequence)
    head.end(sequence, JobState.FAILED)
    with pytest.raises(anthropic.APIStatusError, match="it broke the engine"):
        _ = [event async for event in stream]


async def test_the_client_is_served_when_it_retries_at_a_full_door(
    database_url: str, redis_url: str, head: TinyHead
) -> None:
    async with (
        running_gateway(database_url, redis_url, http_max_in_flight=1) as http,
        official(http) as client,
    ):
        stream = await client.messages.create(
            model="clerk", messages=MESSAGES, max_tokens=64, stream=True
        )
        with pytest.raises(anthropic.RateLimitError):
            await client.with_options(max_retries=0).messages.create(
                model="clerk", messages=MESSAGES, max_tokens=64
            )
        again = asyncio.create_task(
            client.with_options(max_retries=10).messages.create(
                model="clerk", messages=MESSAGES, max_tokens=64
            )
        )
        await until_shown(http, 'shardline_jobs_refused_total{code="overloaded"} 2.0')
        with head.serving():
            assert [event async for event in stream][-1].type == "message_stop"
            assert (await again).stop_reason == "end_turn"
