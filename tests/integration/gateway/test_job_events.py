"""A job's events over real HTTP, Postgres and Valkey: streams are joined again, cut, and waited
for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psycopg
import pytest
from psycopg import sql
from sqlalchemy import text

from services.standalone.servers import Valkey
from shardline.streams import Place
from tests.integration.gateway.running_gateway import (
    COMMENT,
    JOBS,
    PROMPT,
    Event,
    events_of,
    read,
    running_gateway,
    submit,
)
from tests.tiny_head import TinyHead


def ids_and_text(events: list[Event]) -> tuple[list[int], str]:
    deltas = [event.data for event in events if event.name == "delta"]
    return [token_id for delta in deltas for token_id in delta["token_ids"]], "".join(
        delta["text"] for delta in deltas
    )


async def test_events_count_the_tokens_of_a_running_job(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    job_id = await submit(http, logprobs=1)
    sequence = head.claim()
    head.finish(sequence)
    events = await read(http, job_id)
    assert ids_and_text(events) == (list(sequence.output_ids), PROMPT)
    assert (events[-1].name, events[-1].data["state"]) == ("end", "succeeded")
    assert events[-1].event_id == str(Place().then(sequence.output_ids))
    assert events[0].data["logprobs"][0] == [sequence.output_ids[0], -0.25, [[0, -0.5]]]


@pytest.mark.parametrize("way", ["header", "query"])
@pytest.mark.parametrize("is_redis_lost", [False, True])
async def test_a_rejoined_reader_misses_and_repeats_nothing(
    http: httpx.AsyncClient, head: TinyHead, redis_server: Valkey, *, way: str, is_redis_lost: bool
) -> None:
    job_id = await submit(http)
    sequence = head.claim()
    head.say(sequence, 3)
    before = await read(http, job_id, limit=1)
    last = before[-1].event_id
    assert last is not None
    head.say(sequence, 2)
    head.beat(sequence)
    if is_redis_lost:
        redis_server.restart()
    head.finish(sequence)
    options: dict[str, Any] = (
        {"headers": {"Last-Event-ID": last}} if way == "header" else {"params": {"after": last}}
    )

    after = await read(http, job_id, **options)

    assert ids_and_text([*before, *after]) == (list(sequence.output_ids), PROMPT)
    assert [event.name for event in after][-1] == "end"


async def test_a_follower_restarts_when_the_tokens_change(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    job_id = await submit(http)
    sequence = head.claim()
    async with http.stream("GET", f"{JOBS}/{job_id}/events") as reply:
        events = events_of(reply)
        head.say(sequence, 2)
        head.beat(sequence)
        head.say(sequence, 3)
        before = [await anext(events)]
        while len(ids_and_text(before)[0]) < 5:
            before.append(await anext(events))
        other = head.resume_otherwise(sequence)
        head.finish(other)
        *_, last = [event async for event in events]
    assert (last.name, last.event_id, last.data["after"]) == ("interrupted", "0", "0")
    assert last.data["error"]["code"] == "stream_diverged"

    anew = await read(http, job_id, headers={"Last-Event-ID": last.event_id})
    assert ids_and_text(anew) == (list(other.output_ids), anew[-1].data["result"]["text"])
    (cut,) = await read(http, job_id, headers={"Last-Event-ID": str(before[-1].event_id)})
    assert (cut.name, cut.data["error"]["code"]) == ("interrupted", "stream_diverged")


async def test_a_reader_misses_and_repeats_nothing_when_redis_is_lost(
    http: httpx.AsyncClient, head: TinyHead, redis_server: Valkey
) -> None:
    job_id = await submit(http)
    sequence = head.claim()
    head.say(sequence, 2)
    found = []
    async with http.stream("GET", f"{JOBS}/{job_id}/events") as reply:
        events = events_of(reply)
        found.append(await anext(events))
        redis_server.kill()
        head.say(sequence, 3, to_stream=False)
        head.beat(sequence)
        found.append(await anext(events))
        redis_server.restart()
        head.finish(sequence)
        found += [event async for event in events]
    assert ids_and_text(found) == (list(sequence.output_ids), PROMPT)


@contextmanager
def only_the_head_connects(postgres_url: str, head: TinyHead) -> Iterator[None]:
    """Postgres serves the head's connection, and nobody else: to all others it is away."""
    with head.database.begin() as connection:
        own = connection.scalar(text("SELECT pg_backend_pid()"))
    name = str(head.database.url.database)
    allow = sql.SQL("ALTER DATABASE {} WITH ALLOW_CONNECTIONS {}").format
    with psycopg.connect(postgres_url, autocommit=True) as operator:
        operator.execute(allow(sql.Identifier(name), sql.SQL("false")))
        operator.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = %s AND pid <> %s",
            (name, own),
        )
        try:
            yield
        finally:
            operator.execute(allow(sql.Identifier(name), sql.SQL("true")))


async def test_a_reader_gets_the_end_once_postgres_is_back(
    database_url: str, redis_url: str, postgres_url: str, head: TinyHead
) -> None:
    async with running_gateway(database_url, redis_url, http_keep_alive_s=0.1) as http:
        job_id = await submit(http)
        sequence = head.claim()
        async with http.stream("GET", f"{JOBS}/{job_id}/events") as reply:
            events = events_of(reply, with_comments=True)
            with only_the_head_connects(postgres_url, head):
                head.finish(sequence)
                found = [await anext(events)]
                while (
                    len(ids_and_text(found)[0]) < len(sequence.output_ids)
                    or found[-1].name != COMMENT
                ):
                    found.append(await anext(events))
            found += [event async for event in events]
    assert [
        (event.name, event.data["state"]) for event in found if event.name not in ("delta", COMMENT)
    ] == [("end", "succeeded")]


async def test_a_reader_is_told_how_to_rejoin_when_postgres_stays_away(
    database_url: str, redis_url: str, postgres_url: str, head: TinyHead
) -> None:
    async with running_gateway(database_url, redis_url, http_end_wait_s=0.2) as http:
        job_id = await submit(http)
        sequence = head.claim()
        async with http.stream("GET", f"{JOBS}/{job_id}/events") as reply:
            with only_the_head_connects(postgres_url, head):
                head.finish(sequence)
                last = [event async for event in events_of(reply)][-1]
        place = str(Place().then(sequence.output_ids))
        assert (last.name, last.event_id, last.data["after"]) == ("interrupted", place, place)
        assert last.data["error"]["code"] == "unavailable"
        assert f"/v1/jobs/{job_id}/events?after={place}" in last.data["error"]["message"]

        (again,) = await read(http, job_id, headers={"Last-Event-ID": last.event_id})

    assert (again.name, again.data["state"], again.data["result"]["text"]) == (
        "end",
        "succeeded",
        PROMPT,
    )


async def test_only_the_end_is_sent_to_a_follower_from_the_end(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    job_id = await submit(http)
    sequence = head.claim()
    head.finish(sequence)
    (event,) = await read(http, job_id, params={"after": len(sequence.output_ids)})
    assert (event.name, event.data["result"]["text"]) == ("end", PROMPT)


async def test_a_job_goes_on_when_its_reader_leaves(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    job_id = await submit(http)
    sequence = head.claim()
    head.say(sequence)
    await read(http, job_id, limit=1)
    assert not head.beat(sequence)
    head.finish(sequence)
    assert (await http.get(f"{JOBS}/{job_id}")).json()["state"] == "succeeded"


async def test_comments_keep_the_connection_of_a_silent_job_open(
    database_url: str, redis_url: str, head: TinyHead
) -> None:
    async with running_gateway(database_url, redis_url, http_keep_alive_s=0.05) as http:
        job_id = await submit(http)
        async with http.stream("GET", f"{JOBS}/{job_id}/events") as reply:
            lines = reply.aiter_lines()
            async for line in lines:
                if line.startswith(":"):
                    break
            head.finish(head.claim())
            assert "event: end" in [line async for line in lines]


async def test_a_reader_waits_for_an_end_that_takes_longer_than_a_keep_alive(
    database_url: str, redis_url: str, head: TinyHead
) -> None:
    async with running_gateway(database_url, redis_url, http_keep_alive_s=1e-6) as http:
        job_id = await submit(http)
        head.finish(head.claim())
        assert [event.name for event in await read(http, job_id, params={"after": 1_000_000})] == [
            "end"
        ]
