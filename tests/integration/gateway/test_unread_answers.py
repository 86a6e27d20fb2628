"""Answers that their callers do not read: counted while they wait, and cut off in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from uuid import UUID

import httpx
import pytest
from sqlalchemy import text

from shardline.contract.ids import new_id
from shardline.store.inserts import INSERT_PLAINLY
from tests.integration.gateway.running_gateway import events_of, running_gateway
from tests.tiny_head import TinyHead

LARGE_BYTES = 12 << 20
"""More than the sockets of both sides hold."""

IN_FLIGHT = "shardline_http_in_flight"
FOLLOWERS = "shardline_http_followers"


@pytest.fixture
def head(database_url: str, redis_url: str) -> Iterator[TinyHead]:
    head = TinyHead(database_url, redis_url)
    yield head
    head.close()


def large_job(head: TinyHead, *, has_ended: bool = False) -> UUID:
    """A job of another door, whose prompt is large."""
    job_id = new_id()
    with head.database.begin() as connection:
        connection.execute(
            INSERT_PLAINLY,
            {"id": job_id, "model": "clerk", "prompt": "a" * LARGE_BYTES, "params": "{}"},
        )
        if has_ended:
            ended = text("UPDATE jobs SET state = 'cancelled', finished_at = now() WHERE id = :id")
            connection.execute(ended, {"id": job_id})
    return job_id


@asynccontextmanager
async def unread(http: httpx.AsyncClient, path: str) -> AsyncIterator[asyncio.StreamReader]:
    """A caller who asks and does not read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", http.base_url.port, limit=1024)
    lines = (
        f"GET {path} HTTP/1.1",
        "Host: localhost",
        f"Authorization: {http.headers['authorization']}",
        "",
        "",
    )
    writer.write("\r\n".join(lines).encode())
    try:
        yield reader
    finally:
        writer.close()


async def until_shown(http: httpx.AsyncClient, figure: str) -> None:
    async with asyncio.timeout(60):
        while figure not in (await http.get("/metrics")).text:
            pass


async def test_an_unread_answer_is_cut_off_and_frees_its_slot(
    database_url: str, redis_url: str, head: TinyHead
) -> None:
    async with running_gateway(database_url, redis_url, http_write_timeout_s=0.5) as http:
        for job_id, path, gauge in (
            (large_job(head), "", IN_FLIGHT),
            (large_job(head, has_ended=True), "/events", FOLLOWERS),
        ):
            async with unread(http, f"/v1/jobs/{job_id}{path}"):
                await until_shown(http, f"{gauge} 1.0")
                await until_shown(http, f"{gauge} 0.0")
            whole = await http.get(f"/v1/jobs/{job_id}")
            assert len(whole.json()["prompt"]) == LARGE_BYTES
        assert (
            'connections_closed_total{reason="write_timeout"} 2.0'
            in (await http.get("/metrics")).text
        )


async def test_large_answers_over_their_room_are_refused_and_small_ones_sent(
    database_url: str, redis_url: str, head: TinyHead
) -> None:
    room = LARGE_BYTES + LARGE_BYTES // 2
    async with running_gateway(database_url, redis_url, http_max_unsent_bytes=room) as http:
        # Given a caller who does not read a large answer
        job = f"/v1/jobs/{large_job(head, has_ended=True)}"
        async with unread(http, job):
            await until_shown(http, f"{IN_FLIGHT} 1.0")

            # When others ask for large and small ones
            refused = await http.get(job)
            async with http.stream("GET", f"{job}/events") as stream:
                (interrupted,) = [event async for event in events_of(stream)]
            small = await http.get("/v1/jobs")

            # Then the large ones are refused, each in its form, and the small one is sent
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
            assert (interrupted.name, interrupted.data["error"]["code"]) == (
                "interrupted",
                "overloaded",
            )
            assert small.status_code == 200

        # And when the caller has gone there is room again
        await until_shown(http, f"{IN_FLIGHT} 0.0")
        assert (await http.get(job)).status_code == 200
        async with http.stream("GET", f"{job}/events") as stream:
            (end,) = [event async for event in events_of(stream)]
        assert (end.name, len(end.data["prompt"])) == ("end", LARGE_BYTES)
