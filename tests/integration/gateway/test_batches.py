"""Batches, by OpenAI's own client: each line is a job, bad ones are errors, and the files of a
batch are what its rows say, whenever they are read."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Batch
from sqlalchemy import text
from typer.testing import CliRunner, Result

from shardline.cli.commands import cli
from shardline.contract.job import JobState
from tests.integration.gateway.running_gateway import PROMPT, running_gateway
from tests.tiny_head import Sequence, TinyHead

CHATS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
CHAT: Any = {"model": "clerk", "messages": [{"role": "user", "content": PROMPT}]}
EXPIRE = text(
    "UPDATE jobs SET state = 'expired', finished_at = now() WHERE state = 'queued' AND fence = 0"
)
ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture
async def client(http: httpx.AsyncClient) -> AsyncIterator[AsyncOpenAI]:
    key = http.headers["authorization"].removeprefix("Bearer ")
    async with AsyncOpenAI(base_url=f"{http.base_url}/v1/", api_key=key, max_retries=0) as client:
        yield client


def line(custom_id: str, body: Any, url: str = CHATS, **others: Any) -> str:
    fields = {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **others}
    return json.dumps(fields)


async def begin(
    client: AsyncOpenAI, lines: Iterable[str], url: Any = CHATS, **fields: Any
) -> Batch:
    """A batch of these lines."""
    content = "\n".join(lines).encode()
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=url, **{"completion_window": "24h", **fields}
    )


async def until(client: AsyncOpenAI, head: TinyHead, batch: Batch, *statuses: str) -> Batch:
    async with asyncio.timeout(240):
        while (found := await client.batches.retrieve(batch.id)).status not in statuses:
            await asyncio.to_thread(head.wait_for_bell)
    return found


def completed(batch: Batch) -> int:
    """How many lines have succeeded, as the batch counts them."""
    return 0 if batch.request_counts is None else batch.request_counts.completed


async def lines_of(client: AsyncOpenAI, file_id: str | None) -> list[Any]:
    """What a file of a batch has now."""
    if file_id is None:
        return []
    content = (await client.files.content(file_id)).text
    return [json.loads(one) for one in content.splitlines()]


async def test_each_line_is_answered_as_its_route_answers(
    client: AsyncOpenAI, http: httpx.AsyncClient, head: TinyHead
) -> None:
    decision = {
        "model": "clerk",
        "input": PROMPT,
        "questions": [
            {"type": "predicate", "name": "late", "instructions": "It is late."},
            {"type": "choice", "instructions": "Which?", "choices": ["a", "b"]},
        ],
    }
    bodies: dict[str, list[Any]] = {
        CHATS: [
            {**CHAT, "temperature": 0, "logprobs": True, "top_logprobs": 2},
            {**CHAT, "n": 2, "seed": 5, "service_tier": "auto", "return_token_ids": True},
            {**CHAT, "store": True, "metadata": {"order": "7"}, "max_tokens": 2},
            {**CHAT, "retry": {"max_attempts": 5}, "max_tokens": 2},
        ],
        COMPLETIONS: [
            {"model": "clerk", "prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 3},
            {"model": "clerk", "prompt": [PROMPT, "sum: 2 + 2 ="], "n": 2, "seed": 1},
        ],
        "/v1/responses": [{"model": "clerk", "input": PROMPT, "instructions": "Be brief."}],
        "/v1/decisions": [decision],
    }
    with head.serving():
        for url, each in bodies.items():
            alone = [(await http.post(url, json=body)).json() for body in each]
            lines = [line(f"{number}", body, url) for number, body in enumerate(each)]
            batch = await until(client, head, await begin(client, lines, url), *ENDED)
            assert (batch.status, batch.model) == ("completed", "clerk"), batch
            counts = batch.request_counts
            assert counts is not None
            assert (counts.total, counts.completed, counts.failed) == (len(each), len(each), 0)
            output = await lines_of(client, batch.output_file_id)
            assert [one["custom_id"] for one in output] == [f"{n}" for n in range(len(each))]
            assert all(one["error"] is None for one in output)
            assert [one["response"]["status_code"] for one in output] == [200] * len(each)
            for one, expected in zip(output, alone, strict=True):
                found = one["response"]["body"]
                assert timeless(found) == timeless(expected)
            if url == CHATS:
                used = sum(one["response"]["body"]["usage"]["total_tokens"] for one in output)
                assert batch.usage is not None
                assert batch.usage.total_tokens == used
    # What was asked to be stored is, and a response can be asked for
    stored = [one async for one in client.chat.completions.list(metadata={"order": "7"})]
    assert len(stored) == 2
    with head.database.connect() as connection:
        patient = text("SELECT count(*) FROM jobs WHERE retry ->> 'max_attempts' = '5'")
        assert connection.scalar(patient) == 2


def num_lines(head: TinyHead) -> int:
    """Of files that are rows."""
    with head.database.connect() as connection:
        return connection.scalar(text("SELECT count(*) FROM batch_lines")) or 0


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def timeless(answer: Any) -> Any:
    """Without ids and times, which are each answer's own."""
    if isinstance(answer, dict):
        own = ("id", "job_id", "created", "created_at", "completed_at")
        return {name: timeless(value) for name, value in answer.items() if name not in own}
    return [timeless(one) for one in answer] if isinstance(answer, list) else answer


async def test_a_bad_line_is_an_error_and_no_other_line_fails(
    client: AsyncOpenAI, head: TinyHead
) -> None:
    many = "x" * 600
    lines = [
        line("good", CHAT),
        line("no model", {**CHAT, "model": "none"}),
        line("bad field", {**CHAT, "temperature": 9}),
        line("too long", {**CHAT, "messages": [{"role": "user", "content": "sum " * 600}]}),
        line("a stream", {**CHAT, "stream": True}),
        line("an id", {**CHAT, "id": "00000000-0000-0000-0000-000000000001"}),
        line("another tenant", {**CHAT, "tenant": "other"}),
        line("interactive", {**CHAT, "priority": 1}),
        line(many, CHAT),
        line("NUL", {**CHAT, "metadata": {"a": "\0"}}),
        line("none", 5),
        line("other field", CHAT, more=1),
        line("GET", CHAT).replace('"POST"', '"GET"'),
        "",
        "{",
        line("last", CHAT),
    ]
    with head.serving():
        begun = await begin(client, lines, metadata={"of": "tests"})
        batch = await until(client, head, begun, *ENDED)
    assert (batch.status, batch.errors, batch.metadata) == ("completed", None, {"of": "tests"})
    output = await lines_of(client, batch.output_file_id)
    assert [one["custom_id"] for one in output] == ["good", "last"]
    errors = await lines_of(client, batch.error_file_id)
    statuses = [(one["custom_id"], one["response"]["status_code"]) for one in errors]
    assert statuses == [
        ("no model", 404),
        ("bad field", 400),
        ("too long", 400),
        ("a stream", 400),
        ("an id", 400),
        ("another tenant", 403),
        ("interactive", 400),
        (None, 400),
        ("NUL", 400),
        ("none", 400),
        ("other field", 400),
        ("GET", 400),
        (None, 400),
    ]
    assert errors[1]["response"]["body"]["error"]["param"] == "temperature"
    assert "line 15" in errors[-1]["response"]["body"]["error"]["message"]
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (15, 2, 13)
    listed = [one.id async for one in client.files.list(purpose="batch_output")]
    assert set(listed) == {batch.output_file_id, batch.error_file_id}


@pytest.mark.parametrize(
    ("lines", "code", "place"),
    [
        ([], "empty_file", None),
        (["", "x", "y"], "invalid_json_line", 2),
        ([line("a", CHAT), line("b", CHAT), line("a", CHAT)], "duplicate_custom_id", 3),
        ([line("a", CHAT), line("b", CHAT, COMPLETIONS)], "mismatched_url", 2),
    ],
)
async def test_a_file_that_is_no_batch_fails_and_runs_nothing(
    client: AsyncOpenAI, head: TinyHead, lines: list[str], code: str, place: int | None
) -> None:
    batch = await until(client, head, await begin(client, lines), *ENDED)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(one.code, one.line) for one in batch.errors.data] == [(code, place)]
    assert head.claim_all() == []


async def test_output_is_there_as_lines_end_and_a_cancel_keeps_it(
    client: AsyncOpenAI, head: TinyHead
) -> None:
    lines = [line(f"{number}", {**CHAT, "max_tokens": 4}) for number in range(4)]
    batch = await until(client, head, await begin(client, lines), "in_progress")
    async with asyncio.timeout(60):
        sequences: list[Sequence] = []
        while len(sequences) < 4:
            sequences += await asyncio.to_thread(head.claim_all)
    # In the order of lines, whatever order they end in
    first, second, third, fourth = sequences
    head.finish(third)
    assert [one["custom_id"] for one in await lines_of(client, batch.output_file_id)] == ["2"]
    head.finish(first)
    found = await lines_of(client, batch.output_file_id)
    assert [one["custom_id"] for one in found] == ["0", "2"]
    async with asyncio.timeout(60):
        while completed(await client.batches.retrieve(batch.id)) < 2:
            await asyncio.to_thread(head.wait_for_bell)
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    async with asyncio.timeout(60):
        # On a thread: the gateway of this event loop locks the same rows.
        while not all([await asyncio.to_thread(head.beat, one) for one in (second, fourth)]):
            await asyncio.to_thread(head.wait_for_bell)
    for each in (second, fourth):
        head.say(each)
        await asyncio.to_thread(head.end, each, JobState.CANCELLED)
    batch = await until(client, head, batch, *ENDED)
    # Lines that were counted before are not counted again
    assert (batch.status, completed(batch)) == ("cancelled", 2)
    assert await lines_of(client, batch.output_file_id) == found
    errors = await lines_of(client, batch.error_file_id)
    assert [(one["custom_id"], one["error"]["code"]) for one in errors] == [
        ("1", "batch_cancelled"),
        ("3", "batch_cancelled"),
    ]
    assert (await client.batches.cancel(batch.id)).status == "cancelled"
    # Deleted output is gone, and its jobs stay
    assert batch.output_file_id is not None
    await client.files.delete(batch.output_file_id)
    with pytest.raises(openai.NotFoundError):
        await client.files.content(batch.output_file_id)


async def test_batches_are_listed_repeated_and_expire(
    client: AsyncOpenAI, http: httpx.AsyncClient, head: TinyHead
) -> None:
    first = await begin(client, [line("a", CHAT), line("b", CHAT)])
    key = {"Idempotency-Key": "k"}
    body = {
        "input_file_id": first.input_file_id,
        "endpoint": CHATS,
        "completion_window": "1h",
        "output_expires_after": {"anchor": "created_at", "seconds": 3600},
    }
    second, again = [
        (await http.post("/v1/batches", json=body, headers=key)).json()["id"] for _ in range(2)
    ]
    assert second == again
    other = {**body, "endpoint": COMPLETIONS}
    assert (await http.post("/v1/batches", json=other, headers=key)).status_code == 409
    listed = [one.id async for one in client.batches.list(limit=1)]
    assert listed == [second, first.id]
    # Its time is over: as a relay ends jobs that wait
    expired = first
    async with asyncio.timeout(60):
        while expired.status not in ENDED:
            with head.database.begin() as connection:
                connection.execute(EXPIRE)
            await asyncio.to_thread(head.wait_for_bell)
            expired = await client.batches.retrieve(first.id)
    assert (expired.status, expired.output_file_id) == ("expired", None)
    with pytest.raises(openai.ConflictError, match="has ended and is expired"):
        await client.batches.cancel(first.id)
    errors = await lines_of(client, expired.error_file_id)
    assert [one["error"]["code"] for one in errors] == ["batch_expired"] * 2
    wrong = [
        {**body, "completion_window": "24 hours"},
        {**body, "completion_window": "31d"},
        {**body, "endpoint": "/v1/jobs"},
        {**body, "input_file_id": "file-00000000-0000-0000-0000-000000000000"},
        {**body, "input_file_id": expired.error_file_id},
        {**body, "metadata": {"a": "\0"}},
        {**body, "more": 1},
    ]
    for each in wrong:
        assert (await http.post("/v1/batches", json=each)).status_code == 400, each


async def test_a_gateway_goes_on_where_another_one_was(
    database_url: str, redis_url: str, head: TinyHead
) -> None:
    lines = [line(f"{number}", {**CHAT, "max_tokens": 2}) for number in range(300)]
    async with running_gateway(database_url, redis_url) as http:
        key = http.headers["authorization"].removeprefix("Bearer ")
        async with AsyncOpenAI(base_url=f"{http.base_url}/v1/", api_key=key) as client:
            batch = await until(client, head, await begin(client, lines), "in_progress")
            async with asyncio.timeout(60):
                while num_lines(head) < len(lines):
                    await asyncio.to_thread(head.wait_for_bell)
    # Back to the first of three transactions, as if the others had not been committed
    with head.database.begin() as connection:
        for statement in (
            "DELETE FROM jobs USING batch_lines WHERE id = job_id AND line > 128",
            "DELETE FROM batch_lines WHERE line > 128",
            "UPDATE batches SET due_at = now(), next_line = 129, next_byte = "
            + str(sum(len(one) + 1 for one in lines[:128])),
        ):
            connection.execute(text(statement))
    async with running_gateway(database_url, redis_url) as http:
        key = http.headers["authorization"].removeprefix("Bearer ")
        async with AsyncOpenAI(base_url=f"{http.base_url}/v1/", api_key=key) as client:
            with head.serving():
                batch = await until(client, head, batch, *ENDED)
            output = await lines_of(client, batch.output_file_id)
    assert [one["custom_id"] for one in output] == [f"{number}" for number in range(300)]
    with head.database.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM jobs")) == 300


async def test_the_command_runs_a_file_and_goes_on_with_it(
    http: httpx.AsyncClient, head: TinyHead, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    output = tmp_path / "out.jsonl"
    lines = [line("a", CHAT), line("bad", {**CHAT, "temperature": 9}), line("b", CHAT)]
    source.write_text("\n".join(lines))
    names = {
        "OPENAI_BASE_URL": f"{http.base_url}/v1",
        "OPENAI_API_KEY": http.headers["authorization"].removeprefix("Bearer "),
    }

    async def run() -> Result:
        arguments = ["run-batch", "-i", str(source), "-o", str(output)]
        return await asyncio.to_thread(CliRunner().invoke, cli, arguments, env=names)

    # As a command that was killed once its file was there would have left it.
    content = {"file": ("in.jsonl", source.read_bytes())}
    sent = await http.post("/v1/files", files=content, data={"purpose": "batch"})
    note = {
        "digest": hashlib.sha256(source.read_bytes()).hexdigest(),
        "file_id": sent.json()["id"],
    }
    (tmp_path / "out.jsonl.upload").write_text(json.dumps(note))
    with head.serving():
        ran = await run()
    assert (ran.exit_code, "2 of 3 lines completed" in ran.stderr) == (1, True), ran.output
    found = [json.loads(one) for one in output.read_text().splitlines()]
    assert [one["custom_id"] for one in found] == ["a", "b", "bad"]
    assert names_in(tmp_path) == ["in.jsonl", "out.jsonl"]
    assert len((await http.get("/v1/batches")).json()["data"]) == 1
    assert len((await http.get("/v1/files", params={"purpose": "batch"})).json()["data"]) == 1
