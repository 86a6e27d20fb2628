"""OpenAI's own Python client at our doors: answers, streams, each class of error, retries, and
callers who leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionUserMessageParam
from sqlalchemy import text

from shardline.contract.job import JobState
from tests.integration.gateway.running_gateway import PROMPT, claimed, running_gateway
from tests.tiny_head import TinyHead

MESSAGES: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": PROMPT}]


@pytest.fixture
async def client(http: httpx.AsyncClient) -> AsyncIterator[AsyncOpenAI]:
    async with official(http) as client:
        yield client


def official(http: httpx.AsyncClient) -> AsyncOpenAI:
    """OpenAI's client with the same key; it repeats twice by itself, as users have it."""
    key = http.headers["authorization"].removeprefix("Bearer ")
    return AsyncOpenAI(base_url=f"{http.base_url}/v1/", api_key=key)


def num_jobs(head: TinyHead) -> int:
    with head.database.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM jobs")).scalar_one())


async def test_the_client_reads_a_chat_answer(client: AsyncOpenAI, head: TinyHead) -> None:
    with head.serving():
        answer = await client.chat.completions.create(
            model="clerk",
            messages=MESSAGES,
            max_completion_tokens=32,
            logprobs=True,
            top_logprobs=2,
        )
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        PROMPT,
        "stop",
    )
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert {len(entry.top_logprobs) for entry in choice.logprobs.content} == {2}
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(choice.logprobs.content)


async def test_the_client_reads_a_completion(client: AsyncOpenAI, head: TinyHead) -> None:
    with head.serving():
        answer = await client.completions.create(
            model="clerk", prompt=PROMPT, max_tokens=4, logprobs=1
        )
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("sum: 1", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.text_offset == [0, 3, 4, 5]
    assert [model.id async for model in client.models.list()] == ["clerk"]
    assert (await client.models.retrieve("clerk")).id == "clerk"


async def test_streams_have_the_whole_text_and_the_usage(
    client: AsyncOpenAI, head: TinyHead
) -> None:
    with head.serving():
        chat = await client.chat.completions.create(
            model="clerk", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in chat]
        pieces = [
            chunk
            async for chunk in await client.completions.create(
                model="clerk", prompt=PROMPT, stream=True
            )
        ]
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == PROMPT
    )
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens > chunks[-1].usage.prompt_tokens > 0
    assert "".join(piece.choices[0].text for piece in pieces) == PROMPT
    assert pieces[-1].choices[0].finish_reason == "stop"


async def test_each_wrong_request_raises_its_class(
    client: AsyncOpenAI, head: TinyHead, http: httpx.AsyncClient
) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.completions.create(model="clerk", prompt=PROMPT, temperature=9)
    assert (wrong.value.param, wrong.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="other", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="sk-wrong").completions.create(
            model="clerk", prompt=PROMPT
        )
    key = {"Idempotency-Key": "order-1"}
    with head.serving():
        await client.completions.create(model="clerk", prompt=PROMPT, extra_headers=key)
    with pytest.raises(openai.ConflictError) as conflict:
        await client.completions.create(model="clerk", prompt="sum: 9 =", extra_headers=key)
    assert conflict.value.response.headers["x-should-retry"] == "false"
    assert num_jobs(head) == 1


async def test_the_client_does_not_submit_a_failed_job_again(
    client: AsyncOpenAI, head: TinyHead
) -> None:
    asking = asyncio.create_task(client.completions.create(model="clerk", prompt=PROMPT))
    head.end(await claimed(head), JobState.FAILED)
    with pytest.raises(openai.InternalServerError, match="it broke the engine"):
        await asking
    assert num_jobs(head) == 1


async def test_the_client_raises_when_a_streamed_job_fails(
    client: AsyncOpenAI, head: TinyHead
) -> None:
    stream = await client.completions.create(model="clerk", prompt=PROMPT, stream=True)
    sequence = await claimed(head)
    head.say(sequence)
    head.end(sequence, JobState.FAILED)
    with pytest.raises(openai.APIError, match="it broke the engine"):
        _ = [chunk async for chunk in stream]


async def test_the_client_is_served_when_it_retries_at_a_full_door(
    database_url: str, redis_url: str, head: TinyHead
) -> None:
    async with (
        running_gateway(database_url, redis_url, http_max_in_flight=1) as http,
        official(http) as client,
    ):
        stream = await client.completions.create(model="clerk", prompt=PROMPT, stream=True)
        with pytest.raises(openai.RateLimitError):
            await client.with_options(max_retries=0).completions.create(
                model="clerk", prompt=PROMPT
            )
        again = asyncio.create_task(
            client.with_options(max_retries=10).completions.create(model="clerk", prompt=PROMPT)
        )
        async with asyncio.timeout(30):
            while (
                'shardline_jobs_refused_total{code="overloaded"} 2.0'
                not in (await http.get("/metrics")).text
            ):
                pass
        with head.serving():
            assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "stop"
            assert (await again).choices[0].text == PROMPT
    assert num_jobs(head) == 2


async def test_closing_a_stream_cancels_its_job_unless_it_has_a_key(
    client: AsyncOpenAI, head: TinyHead
) -> None:
    key = {"Idempotency-Key": "order-2"}
    keyed = await client.completions.create(
        model="clerk", prompt=PROMPT, stream=True, extra_headers=key
    )
    kept = await claimed(head)
    head.say(kept)
    await keyed.close()
    plain = await client.completions.create(model="clerk", prompt=PROMPT, stream=True)
    lost = await claimed(head)
    await plain.close()
    async with asyncio.timeout(30):
        while not head.beat(lost):
            await asyncio.to_thread(head.wait_for_bell)
    assert not head.beat(kept)
    head.finish(kept)
    again = await client.completions.create(model="clerk", prompt=PROMPT, extra_headers=key)
    assert (again.choices[0].text, again.id) == (PROMPT, f"cmpl-{kept.claimed.job_id}")
