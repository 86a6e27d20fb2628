"""OpenAI's doors over real HTTP, Postgres and Valkey: answers, streams, refusals, and callers who
leave."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import Any
from uuid import uuid4

import httpx
import pytest

from shardline.contract.job import JobState
from tests.integration.gateway.running_gateway import PROMPT, claimed, events_of
from tests.integration.rows import change
from tests.tiny_head import NUM_CACHED, TinyHead

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": PROMPT}]


async def test_a_completion_has_openais_shape(http: httpx.AsyncClient, head: TinyHead) -> None:
    with head.serving():
        reply = await http.post(TEXT, json={"model": "clerk", "prompt": PROMPT, "max_tokens": 4})
    assert reply.status_code == 200
    body = reply.json()
    assert body["id"].startswith("cmpl-")
    assert reply.headers["x-request-id"] == body["id"]
    assert (body["object"], body["model"], body["system_fingerprint"]) == (
        "text_completion",
        "clerk",
        "fp_f1",
    )
    assert body["choices"] == [
        {"index": 0, "finish_reason": "length", "text": "sum: 1", "logprobs": None}
    ]
    assert body["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 4,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": NUM_CACHED},
    }

    job = (await http.get(f"/v1/jobs/{body['id']}")).json()
    assert (job["state"], job["result"]["text"]) == ("succeeded", "sum: 1")


async def test_token_ids_are_answered_with_token_ids(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    with head.serving():
        for prompt in ([1, 20, 21], [[1, 20, 21]]):
            fields = {"model": "clerk", "prompt": prompt, "return_token_ids": True}
            (choice,) = (await http.post(TEXT, json=fields)).json()["choices"]
            assert (choice["prompt_token_ids"], choice["token_ids"]) == ([1, 20, 21], [20, 21, 2])
            assert choice["finish_reason"] == "stop"


async def test_messages_are_rendered_by_the_template(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    parts = [{"type": "text", "text": "sum: 1 + 2"}]
    with head.serving():
        fields = {
            "model": "clerk",
            "messages": [{"role": "user", "content": parts}],
            "max_completion_tokens": 20,
        }
        reply = await http.post(CHAT, json=fields)
    body = reply.json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": PROMPT,
        "refusal": None,
    }


async def test_logprobs_come_in_both_of_openais_forms(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    with head.serving():
        text = await http.post(
            TEXT, json={"model": "clerk", "prompt": PROMPT, "max_tokens": 3, "logprobs": 2}
        )
        fields = {
            "model": "clerk",
            "messages": MESSAGES,
            "max_tokens": 2,
            "logprobs": True,
            "top_logprobs": 1,
        }
        chat = await http.post(CHAT, json=fields)
    logprobs = text.json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["sum", ":", " "]
    assert logprobs["text_offset"] == [0, 3, 4]
    assert logprobs["token_logprobs"] == [-0.25] * 3
    assert logprobs["top_logprobs"][0] == {"<pad>": -0.5, "<bos>": -1.5, "sum": -0.25}
    first = chat.json()["choices"][0]["logprobs"]["content"][0]
    assert first == {
        "token": "sum",
        "logprob": -0.25,
        "bytes": [115, 117, 109],
        "top_logprobs": [{"token": "<pad>", "logprob": -0.5, "bytes": []}],
    }


async def test_tokens_are_streamed_one_by_one(http: httpx.AsyncClient, head: TinyHead) -> None:
    fields = {
        "model": "clerk",
        "prompt": PROMPT,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with http.stream("POST", TEXT, json={**fields, "return_token_ids": True}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["x-request-id"].startswith("cmpl-")
        events = events_of(reply)
        opening = (await anext(events)).data
        sequence = await claimed(head)
        head.say(sequence)
        first = (await anext(events)).data
        head.finish(sequence)
        rest = [event.data async for event in events]

    assert opening["choices"][0]["prompt_token_ids"] == list(sequence.claimed.prompt_ids)
    assert first["choices"][0]["text"] == "sum"
    assert first["usage"] is None
    *chunks, closing, usage, done = rest
    choices = [chunk["choices"][0] for chunk in (first, *chunks)]
    assert "".join(choice["text"] for choice in choices) == PROMPT
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == list(
        sequence.output_ids
    )
    assert closing["choices"][0]["finish_reason"] == "stop"
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], len(sequence.output_ids))
    assert done == "[DONE]"


@pytest.mark.parametrize(
    ("path", "prompt"), [(TEXT, {"prompt": PROMPT}), (CHAT, {"messages": MESSAGES})]
)
async def test_each_chunk_has_the_usage_so_far_if_it_is_asked_for(
    http: httpx.AsyncClient, head: TinyHead, path: str, prompt: dict[str, Any]
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "clerk", **prompt, "stream": True, "stream_options": options}
    async with http.stream("POST", path, json={**body, "return_token_ids": True}) as reply:
        events = events_of(reply)
        sequence = await claimed(head)
        head.say(sequence)
        seen = [(await anext(events)).data, (await anext(events)).data]
        head.finish(sequence)
        seen += [event.data async for event in events]
    *chunks, final, _ = seen
    num_output = 0
    for chunk in chunks:
        num_output += len(chunk["choices"][0]["token_ids"])
        assert chunk["usage"]["prompt_tokens"] == len(sequence.claimed.prompt_ids)
        assert chunk["usage"]["completion_tokens"] == num_output
    assert final["usage"]["completion_tokens"] == num_output == len(sequence.output_ids)

    # As in vLLM, whose field it is, it says nothing alone.
    body["stream_options"] = {"continuous_usage_stats": True}
    with head.serving():
        lines = (await http.post(path, json=body)).text
    assert '"usage"' not in lines


async def test_a_chat_stream_begins_with_the_role(http: httpx.AsyncClient, head: TinyHead) -> None:
    with head.serving():
        async with http.stream(
            "POST", CHAT, json={"model": "clerk", "messages": MESSAGES, "stream": True}
        ) as reply:
            *chunks, closing, done = [event.data async for event in events_of(reply)]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == PROMPT
    assert closing["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert {chunk["object"] for chunk in (*chunks, closing)} == {"chat.completion.chunk"}
    assert done == "[DONE]"


async def test_the_stream_of_a_failing_job_says_so(http: httpx.AsyncClient, head: TinyHead) -> None:
    async with http.stream(
        "POST", TEXT, json={"model": "clerk", "prompt": PROMPT, "stream": True}
    ) as reply:
        sequence = await claimed(head)
        head.end(sequence, JobState.FAILED)
        error, done = [event.data async for event in events_of(reply)]
    assert error["error"]["code"] == "job_failed"
    assert "it broke the engine" in error["error"]["message"]
    assert done == "[DONE]"


async def test_a_stream_ends_with_an_error_when_the_tokens_change(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    fields = {"model": "clerk", "prompt": PROMPT, "stream": True, "return_token_ids": True}
    async with http.stream("POST", TEXT, json=fields) as reply:
        sequence = await claimed(head)
        events = events_of(reply)
        head.say(sequence, 2)
        head.beat(sequence)
        head.say(sequence, 3)
        num_said = 0
        while num_said < 5:
            num_said += len((await anext(events)).data["choices"][0]["token_ids"])
        head.finish(head.resume_otherwise(sequence))
        error, done = [event.data async for event in events]
    assert error["error"]["code"] == "stream_diverged"
    assert done == "[DONE]"
    job = (await http.get(f"/v1/jobs/{sequence.claimed.job_id}")).json()
    assert (job["state"], job["cancel_requested"]) == ("succeeded", False)


@pytest.mark.parametrize(
    ("state", "status", "code"),
    [(JobState.FAILED, 500, "job_failed"), (JobState.CANCELLED, 409, "job_cancelled")],
)
async def test_the_status_says_why_there_is_no_completion(
    http: httpx.AsyncClient, head: TinyHead, state: JobState, status: int, code: str
) -> None:
    asking = asyncio.create_task(http.post(TEXT, json={"model": "clerk", "prompt": PROMPT}))
    head.end(await claimed(head), state)
    reply = await asking
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert reply.headers["x-request-id"].startswith("cmpl-")
    assert reply.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        (TEXT, {"prompt": PROMPT}, 404),
        (TEXT, {"prompt": PROMPT, "stream": True}, 200),
        (
            "/v1/decisions",
            {"input": PROMPT, "questions": [{"type": "predicate", "instructions": "A sum?"}]},
            404,
        ),
    ],
    ids=["whole", "stream", "decision"],
)
async def test_a_job_that_somebody_deletes_is_told_as_not_found(
    http: httpx.AsyncClient, head: TinyHead, path: str, fields: dict[str, Any], status: int
) -> None:
    asking = asyncio.create_task(http.post(path, json={"model": "clerk", **fields}))
    job_id = (await claimed(head)).claimed.job_id
    change(head.database, "DELETE FROM jobs WHERE id = :id", id=job_id)
    reply = await asking
    assert reply.status_code == status
    assert f"no job has the id {job_id}" in reply.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_job_with_a_key_survives_its_callers_connection_and_the_repeat_gets_it(
    http: httpx.AsyncClient, head: TinyHead, stream: bool
) -> None:
    fields = {"model": "clerk", "prompt": PROMPT}
    headers = {"Idempotency-Key": "order-8"}
    asking = asyncio.create_task(
        http.post(TEXT, json={**fields, "stream": stream}, headers=headers)
    )
    sequence = await claimed(head)
    head.say(sequence)
    asking.cancel()
    await asyncio.wait({asking})
    again = asyncio.create_task(http.post(TEXT, json=fields, headers=headers))
    # A caller without a key who leaves at the same time is seen to be cancelled.
    other = asyncio.create_task(http.post(TEXT, json=fields))
    others = await claimed(head)
    other.cancel()
    async with asyncio.timeout(30):
        while not head.beat(others):
            await asyncio.to_thread(head.wait_for_bell)
    assert not head.beat(sequence)
    head.finish(sequence)
    reply = await again
    assert (reply.status_code, reply.json()["choices"][0]["text"]) == (200, PROMPT)
    assert reply.json()["id"].endswith(str(sequence.claimed.job_id))


@pytest.mark.parametrize("stream", [False, True])
async def test_the_job_of_a_caller_who_leaves_is_cancelled_and_nothing_is_logged(
    http: httpx.AsyncClient, head: TinyHead, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    asking = asyncio.create_task(
        http.post(TEXT, json={"model": "clerk", "prompt": PROMPT, "stream": stream})
    )
    sequence = await claimed(head)
    head.say(sequence)
    asking.cancel()
    async with asyncio.timeout(30):
        while not head.beat(sequence):
            await asyncio.to_thread(head.wait_for_bell)
    head.end(sequence, JobState.CANCELLED)
    job = (await http.get(f"/v1/jobs/{sequence.claimed.job_id}")).json()
    assert (job["state"], job["result"]["finish_reason"]) == ("cancelled", "cancelled")
    # A future whose end nobody asked for tells so when it is collected.
    gc.collect()
    assert [one.message for one in caplog.records if one.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("name", [{}, {"id": str(uuid4())}], ids=["key", "id"])
@pytest.mark.parametrize(
    ("route", "content", "other"),
    [
        (TEXT, {"prompt": PROMPT}, {"prompt": "sum: 9 ="}),
        (CHAT, {"messages": MESSAGES}, {"messages": [*MESSAGES, *MESSAGES]}),
        (TEXT, {"prompt": PROMPT}, {"prompt": PROMPT, "temperature": 0.5}),
    ],
)
async def test_a_request_repeated_by_id_or_key_is_the_same_job(
    http: httpx.AsyncClient,
    head: TinyHead,
    *,
    name: dict[str, str],
    route: str,
    content: Any,
    other: Any,
) -> None:
    headers = {} if name else {"Idempotency-Key": "order-7"}
    with head.serving():
        replies = [
            await http.post(route, json={"model": "clerk", **name, **fields}, headers=headers)
            for fields in (content, content, other)
        ]
    assert replies[0].json()["id"] == replies[1].json()["id"]
    assert (replies[2].status_code, replies[2].json()["error"]["code"]) == (409, "conflict")


async def test_a_repeat_that_leaves_does_not_cost_the_first_caller_its_answer(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    fields = {"model": "clerk", "prompt": PROMPT, "id": str(uuid4())}
    first = asyncio.create_task(http.post(TEXT, json=fields))
    sequence = await claimed(head)
    async with http.stream("POST", TEXT, json={**fields, "stream": True}) as repeat:
        head.say(sequence)
        await anext(events_of(repeat))
    async with asyncio.timeout(30):
        while "shardline_http_in_flight 1.0" not in (await http.get("/metrics")).text:
            await asyncio.to_thread(head.wait_for_bell)
    assert not head.beat(sequence)
    head.finish(sequence)
    assert (await first).json()["choices"][0]["text"] == PROMPT


async def test_the_prompts_ids_of_a_chat_are_at_the_top_of_answer_and_first_chunk(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    fields = {"model": "clerk", "messages": MESSAGES, "max_tokens": 2, "return_token_ids": True}
    with head.serving():
        whole = (await http.post(CHAT, json=fields)).json()
        async with http.stream("POST", CHAT, json={**fields, "stream": True}) as response:
            chunks = [event.data async for event in events_of(response)][:-1]
    ids = whole["prompt_token_ids"]
    assert len(ids) == whole["usage"]["prompt_tokens"]
    assert "prompt_token_ids" not in whole["choices"][0]
    assert whole["choices"][0]["token_ids"] == ids[1:3]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [ids, *[None] * (len(chunks) - 1)]
    assert all("prompt_token_ids" not in choice for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize(
    ("path", "asked"), [(TEXT, {"prompt": PROMPT}), (CHAT, {"messages": MESSAGES})]
)
async def test_a_streams_usage_is_that_of_the_whole_answer(
    http: httpx.AsyncClient, head: TinyHead, path: str, asked: dict[str, Any]
) -> None:
    fields = {"model": "clerk", "max_tokens": 3, **asked}
    streamed = {**fields, "stream": True, "stream_options": {"include_usage": True}}
    with head.serving():
        whole = (await http.post(path, json=fields)).json()
        async with http.stream("POST", path, json=streamed) as response:
            chunks = [event.data async for event in events_of(response)][:-1]
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": NUM_CACHED}
