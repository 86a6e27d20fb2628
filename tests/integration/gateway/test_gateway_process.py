"""The gateway as a process: it ends in good order, and serves within what its shell allows."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from uuid import UUID

import httpx
import pytest
from sqlalchemy import text

from services.standalone.ports import free_port
from shardline.contract.api_key import bearer
from tests.integration.gateway.running_gateway import (
    JOBS,
    PROMPT,
    events_of,
    gateway_server,
    make_key,
    until_shown,
)
from tests.repository import REPOSITORY
from tests.tiny_head import TinyHead, tiny_head

BODY = {"model": "clerk", "prompt": PROMPT}
CHAT_STREAM = {"model": "clerk", "messages": [{"role": "user", "content": PROMPT}], "stream": True}


@pytest.fixture
def head(database_url: str, redis_url: str) -> Iterator[TinyHead]:
    head = TinyHead(database_url, redis_url)
    yield head
    head.close()


async def test_a_stopping_gateway_answers_a_waiting_caller_first(
    database_url: str, redis_url: str
) -> None:
    with tiny_head(database_url, redis_url) as head:
        async with gateway_process(database_url, redis_url) as (process, http):
            async with http.stream(
                "POST", "/v1/completions", json={**BODY, "stream": True}
            ) as stream:
                sequence = head.claim()
                head.say(sequence)
                events = events_of(stream)
                first = (await anext(events)).data
                process.send_signal(signal.SIGTERM)
                head.finish(sequence)
                *rest, closing, done = [event.data async for event in events]
            assert await asyncio.to_thread(process.wait, 60) == 0
        text = "".join(chunk["choices"][0]["text"] for chunk in (first, *rest))
        assert (text, closing["choices"][0]["finish_reason"], done) == (PROMPT, "stop", "[DONE]")


async def test_callers_hear_that_their_jobs_go_on_when_the_stop_time_is_over(
    database_url: str, redis_url: str, head: TinyHead
) -> None:
    server = gateway_server(database_url, redis_url, time_scale=0.01)
    serving = asyncio.create_task(server.serve())
    address = f"http://127.0.0.1:{server.config.port}"
    retries = httpx.AsyncHTTPTransport(retries=10)
    headers = bearer(make_key(database_url))
    async with httpx.AsyncClient(
        base_url=address, headers=headers, transport=retries, timeout=60
    ) as http:
        waiting = asyncio.create_task(http.post("/v1/completions", json=BODY))
        streams = [asyncio.create_task(http.post("/v1/chat/completions", json=CHAT_STREAM))]
        async with asyncio.timeout(30):
            while len(sequences := await asyncio.to_thread(queued_jobs, head)) < 2:
                await asyncio.to_thread(head.wait_for_bell)
        streams.append(asyncio.create_task(http.get(f"{JOBS}/{sequences[0]}/events")))
        await until_shown(http, "shardline_http_in_flight 2.0")
        await until_shown(http, "shardline_http_followers 1.0")
        server.should_exit = True
        reply, (chat, events) = await waiting, await asyncio.gather(*streams)
        await serving
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    error = reply.json()["error"]
    assert error["code"] == "gateway_stopping"
    assert reply.headers["x-request-id"] == f"cmpl-{error['job_id']}"
    assert b'"gateway_stopping"' in chat.content
    assert chat.content.endswith(b"data: [DONE]\n\n")
    assert b"event: interrupted" in events.content
    assert not any(head.beat(sequence) for sequence in head.claim_all()), "a job was cancelled"


async def test_every_caller_is_answered_where_the_shell_allows_few_open_files(
    database_url: str, redis_url: str, head: TinyHead
) -> None:
    few = 64
    many = 100
    async with gateway_process(database_url, redis_url, files=few) as (_, http):
        job_id = (await http.post(JOBS, json=BODY)).json()["id"]
        lines = [f"GET {JOBS}/{job_id}/events HTTP/1.1", "Host: localhost"]
        request = "\r\n".join(
            [*lines, f"Authorization: {http.headers['authorization']}", "", ""]
        ).encode()
        callers = [
            await asyncio.open_connection("127.0.0.1", http.base_url.port) for _ in range(many)
        ]
        for _, writer in callers:
            writer.write(request)
        async with asyncio.timeout(60):
            statuses = [await reader.readline() for reader, _ in callers]
        for _, writer in callers:
            writer.close()
    assert statuses == [b"HTTP/1.1 200 OK\r\n"] * many


def queued_jobs(head: TinyHead) -> list[UUID]:
    with head.database.connect() as connection:
        return list(connection.scalars(text("SELECT id FROM jobs WHERE state = 'queued'")))


@asynccontextmanager
async def gateway_process(
    database_url: str, redis_url: str, *, files: int | None = None
) -> AsyncIterator[tuple[subprocess.Popen[bytes], httpx.AsyncClient]]:
    """`python -m services.gateway` as operators run it, in a shell that allows so many open files
    at first."""
    port = free_port()
    settings = {"DATABASE_URL": database_url, "REDIS_URL": redis_url, "HTTP_PORT": str(port)}
    environment = {**os.environ, **{f"SHARDLINE_{name}": value for name, value in settings.items()}}
    environment["PYTHONPATH"] = f"{REPOSITORY}:{REPOSITORY / 'shared'}"
    limits = [] if files is None else ["sh", "-c", f'ulimit -S -n {files}; exec "$@"', "sh"]
    command = [*limits, sys.executable, "-m", "services.gateway"]
    process = await asyncio.to_thread(subprocess.Popen, command, env=environment, cwd=REPOSITORY)
    try:
        retries = httpx.AsyncHTTPTransport(retries=10)
        headers = bearer(make_key(database_url))
        address = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(
            base_url=address, headers=headers, transport=retries, timeout=60
        ) as http:
            async with asyncio.timeout(60):
                await http.get("/health")
            yield process, http
    finally:
        process.kill()
        process.wait()
