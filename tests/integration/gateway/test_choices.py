"""Several choices of one request over HTTP: a row for each, all or none, one answer, one repeat."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from sqlalchemy import text

from shardline.contract.choices import choice_seed
from shardline.contract.job import JobState
from tests.integration.gateway.running_gateway import PROMPT, running_gateway
from tests.tiny_head import Sequence, TinyHead

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
ROWS = text(
    "SELECT id, choice_of, choice_index, seed, prompt, priority, metadata, created_at, state"
    " FROM jobs ORDER BY choice_index"
)


@pytest.fixture
async def http(
    database_url: str, redis_url: str, head: TinyHead
) -> AsyncIterator[httpx.AsyncClient]:
    async with running_gateway(database_url, redis_url, http_max_in_flight=40) as http:
        yield http


@pytest.fixture
async def client(http: httpx.AsyncClient) -> AsyncIterator[AsyncOpenAI]:
    key = http.headers["authorization"].removeprefix("Bearer ")
    async with AsyncOpenAI(base_url=f"{http.base_url}/v1/", api_key=key) as client:
        yield client


def rows(head: TinyHead) -> list[Any]:
    """All jobs."""
    with head.database.connect() as connection:
        return list(connection.execute(ROWS))


async def all_claimed(head: TinyHead, num: int) -> list[Sequence]:
    """So many jobs, in the order of their choices."""
    async with asyncio.timeout(60):
        while not (found := await asyncio.to_thread(head.claim_all)):
            await asyncio.to_thread(head.wait_for_bell)
    assert len(found) == num, "all were stored at once"
    order = {row.id: row.choice_index for row in rows(head)}
    return sorted(found, key=lambda sequence: order[sequence.claimed.job_id])


async def test_each_choice_is_a_row_and_the_first_one_names_them_all(
    client: AsyncOpenAI, head: TinyHead
) -> None:
    with head.serving():
        answer = await client.chat.completions.create(
            model="clerk",
            messages=MESSAGES,
            n=3,
            seed=7,
            service_tier="priority",
            metadata={"order": "9"},
        )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {PROMPT}
    found = rows(head)
    first = UUID(answer.id.removeprefix("chatcmpl-"))
    assert [(row.id == first, row.choice_of, row.choice_index) for row in found] == [
        (True, first, 0),
        (False, first, 1),
        (False, first, 2),
    ]
    assert [row.seed for row in found] == [7, choice_seed(7, 1), choice_seed(7, 2)]
    assert len({row.seed for row in found}) == 3
    assert {(row.priority, row.metadata["order"], row.created_at) for row in found} == {
        (1, "9", found[0].created_at)
    }
    assert answer.service_tier == "priority"
    assert answer.created == int(found[0].created_at.timestamp())
    with head.database.connect() as connection:
        counts = connection.execute(text("SELECT prompt_tokens, completion_tokens FROM results"))
        prompts, outputs = zip(*counts, strict=True)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        prompts[0],
        sum(outputs),
    )


async def test_prompts_come_back_in_their_order_each_n_times(
    client: AsyncOpenAI, head: TinyHead
) -> None:
    prompts = [PROMPT, "words: 417 =", "sort: 2, 1 ="]
    with head.serving():
        answer = await client.completions.create(model="clerk", prompt=prompts, n=2, max_tokens=100)
        by_ids = await client.completions.create(
            model="clerk", prompt=[[5, 6], [7, 8, 9]], extra_body={"return_token_ids": True}
        )
    assert [choice.text for choice in answer.choices] == [one for one in prompts for _ in "12"]
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.model_dump()["prompt_token_ids"] for choice in by_ids.choices] == [
        [5, 6],
        [7, 8, 9],
    ]
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens == 5


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_a_stream_has_all_choices_one_end_each_and_one_usage(
    client: AsyncOpenAI, head: TinyHead, path: str
) -> None:
    fields: Any = {
        "model": "clerk",
        "n": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if path == TEXT:
        stream = await client.completions.create(prompt=PROMPT, **fields)
    else:
        stream = await client.chat.completions.create(messages=MESSAGES, **fields)
    sequences = await all_claimed(head, 3)
    # Word by word, in turns, the last one first.
    for sequence in reversed(sequences):
        head.say(sequence)
    for sequence in sequences:
        head.finish(sequence)
    chunks = [chunk async for chunk in stream]
    texts = ["", "", ""]
    ends = []
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        delta = choice.text if path == TEXT else choice.delta.content
        texts[choice.index] += delta or ""
        ends += [choice.index] if choice.finish_reason else []
    assert texts == [PROMPT] * 3
    assert sorted(ends) == [0, 1, 2]
    assert (chunks[-1].choices, [chunk.usage for chunk in chunks[:-1]]) == (
        [],
        [None] * (len(chunks) - 1),
    )
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens > 3 * len(sequences[0].output_ids)


async def test_a_repeat_finds_all_choices_and_another_request_is_a_conflict(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    key = {"Idempotency-Key": "order-1"}
    body = {"model": "clerk", "prompt": [PROMPT, "words: 417 ="], "n": 2, "max_tokens": 100}
    with head.serving():
        answers = [await http.post(TEXT, json=body, headers=key) for _ in range(2)]
        texts = [[choice["text"] for choice in one.json()["choices"]] for one in answers]
        others = [
            await http.post(TEXT, json={**body, **change}, headers=key)
            for change in (
                {"n": 1},
                {"n": 3},
                {"prompt": [PROMPT]},
                {"prompt": [PROMPT, "words: 5 ="]},
                {"temperature": 0.5},
            )
        ]
    assert texts[0] == texts[1] == [PROMPT, PROMPT, "words: 417 =", "words: 417 ="]
    assert answers[0].json() == answers[1].json()
    assert len(rows(head)) == 4
    assert [one.status_code for one in others] == [409] * 5
    assert "choice 2" in others[3].json()["error"]["message"]


async def test_a_choice_that_fails_makes_an_error_and_leaves_the_others(
    client: AsyncOpenAI, head: TinyHead
) -> None:
    asking = asyncio.create_task(
        client.chat.completions.create(model="clerk", messages=MESSAGES, n=3)
    )
    good, bad, other = await all_claimed(head, 3)
    head.end(bad, JobState.FAILED)
    head.finish(good)
    head.finish(other)
    with pytest.raises(openai.InternalServerError, match=r"choice 1 of 3: .* broke the engine"):
        await asking
    assert [row.state for row in rows(head)] == ["succeeded", "failed", "succeeded"]


async def test_a_stream_tells_of_a_failed_choice_last(client: AsyncOpenAI, head: TinyHead) -> None:
    stream = await client.completions.create(model="clerk", prompt=PROMPT, n=2, stream=True)
    bad, good = await all_claimed(head, 2)
    head.end(bad, JobState.FAILED)
    head.finish(good)
    heard = ""
    with pytest.raises(openai.APIError, match="choice 0 of 2"):  # noqa: PT012 (it ends a stream)
        async for chunk in stream:
            heard += chunk.choices[0].text
    assert heard == PROMPT


async def test_a_caller_who_leaves_cancels_all_choices(client: AsyncOpenAI, head: TinyHead) -> None:
    stream = await client.completions.create(model="clerk", prompt=PROMPT, n=2, stream=True)
    sequences = await all_claimed(head, 2)
    await stream.close()
    async with asyncio.timeout(60):
        while not all(head.beat(sequence) for sequence in sequences):
            await asyncio.to_thread(head.wait_for_bell)


async def test_choices_count_as_requests_in_flight(
    http: httpx.AsyncClient, client: AsyncOpenAI, head: TinyHead
) -> None:
    too_many = await http.post(TEXT, json={"model": "clerk", "prompt": PROMPT, "n": 36})
    assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "n")
    stream = await client.completions.create(model="clerk", prompt=PROMPT, n=30, stream=True)
    refused = await http.post(TEXT, json={"model": "clerk", "prompt": PROMPT, "n": 10})
    assert refused.status_code == 429
    assert refused.headers["x-should-retry"] == "true"
    assert int(refused.headers["retry-after-ms"]) > 0
    assert len(rows(head)) == 30, "nothing of a refused request is stored"
    await stream.close()


@pytest.mark.parametrize("path", ["/v1/jobs"])
async def test_other_doors_name_the_remedy(http: httpx.AsyncClient, path: str) -> None:
    reply = await http.post(path, json={"model": "clerk", "prompt": PROMPT, "n": 2})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "n"
    assert "one request for each" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"messages": MESSAGES, "n": 36}, "n"),
        (TEXT, {"prompt": PROMPT, "n": 36}, "n"),
        (TEXT, {"prompt": [PROMPT] * 36}, "prompt"),
        (
            "/v1/decisions",
            {"input": PROMPT, "questions": [{"type": "predicate", "instructions": "A?"}] * 36},
            "questions",
        ),
    ],
)
async def test_a_request_for_too_many_jobs_is_refused_by_the_field_that_was_sent(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], field: str
) -> None:
    reply = await http.post(path, json={"model": "clerk", **body})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, field)
    assert "36 jobs; this gateway answers 35" in error["message"]
