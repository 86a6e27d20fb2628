"""The native door over real HTTP, Postgres and Valkey: jobs outlive callers, event streams are
joined again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import httpx
import psycopg
import pytest
from psycopg import sql
from sqlalchemy import text

from services.standalone.servers import Valkey
from shardline.contract.job import JobState
from shardline.streams import Place
from tests.integration.gateway.running_gateway import (
    COMMENT,
    PROMPT,
    Event,
    events_of,
    running_gateway,
)
from tests.tiny_head import TinyHead, tiny_head

JOBS = "/v1/jobs"
UNKNOWN = "00000000-0000-4000-8000-000000000000"


@pytest.fixture
def head(database_url: str, redis_url: str) -> Iterator[TinyHead]:
    with tiny_head(database_url, redis_url) as head:
        yield head


@pytest.fixture
async def http(
    database_url: str, redis_url: str, head: TinyHead
) -> AsyncIterator[httpx.AsyncClient]:
    async with running_gateway(database_url, redis_url) as http:
        yield http


async def submit(http: httpx.AsyncClient, **fields: Any) -> str:
    reply = await http.post(JOBS, json={"model": "clerk", "prompt": PROMPT, **fields})
    assert reply.status_code == 202, reply.text
    return str(reply.json()["id"])


async def read(
    http: httpx.AsyncClient, job_id: str, limit: int | None = None, **options: Any
) -> list[Event]:
    """Events up to `limit`, or to the end; then the connection is closed."""
    found = []
    async with http.stream("GET", f"{JOBS}/{job_id}/events", **options) as reply:
        assert reply.status_code == 200
        async for event in events_of(reply):
            found.append(event)
            if len(found) == limit:
                break
    return found


def ids_and_text(events: list[Event]) -> tuple[list[int], str]:
    deltas = [event.data for event in events if event.name == "delta"]
    return [token_id for delta in deltas for token_id in delta["token_ids"]], "".join(
        delta["text"] for delta in deltas
    )


async def test_submitting_answers_at_once_with_the_row_stored(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    own = str(uuid4())
    reply = await http.post(
        JOBS, json={"model": "clerk", "prompt": PROMPT, "id": own, "metadata": {"a": [1]}}
    )
    assert (reply.status_code, reply.headers["location"]) == (202, f"/v1/jobs/{own}")
    assert reply.json() == {"id": own, "object": "job", "model": "clerk", "state": "queued"}

    job = (await http.get(f"{JOBS}/{own}")).json()
    assert (job["state"], job["metadata"], job["result"]) == ("queued", {"a": [1]}, None)
    assert job["prompt_token_ids"][0] == 1

    head.finish(head.claim())
    job = (await http.get(f"{JOBS}/{own}")).json()
    result = job["result"]
    assert (job["state"], result["text"], result["finish_reason"]) == ("succeeded", PROMPT, "stop")
    assert result["usage"]["total_tokens"] == len(job["prompt_token_ids"]) + len(
        result["token_ids"]
    )
    assert (result["exact"], result["timings"], result["provenance"]) == (
        True,
        {"running_s": 0.1},
        {"fingerprint": "f1"},
    )


async def test_a_callers_trace_is_stored_in_the_row(
    http: httpx.AsyncClient, database_url: str
) -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await http.post(
        JOBS, json={"model": "clerk", "prompt": PROMPT}, headers={"traceparent": traceparent}
    )
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT traceparent FROM jobs").fetchall() == [(traceparent,)]


async def test_a_repeat_is_the_same_job(http: httpx.AsyncClient) -> None:
    fields = {"model": "clerk", "prompt": PROMPT, "idempotency_key": "k"}
    first, second = [await http.post(JOBS, json=fields) for _ in "ab"]
    assert (first.status_code, second.status_code) == (202, 200)
    assert first.json()["id"] == second.json()["id"]


async def test_a_request_repeated_with_its_own_id_gets_200_and_the_present_state(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    fields = {
        "model": "clerk",
        "messages": [{"role": "user", "content": PROMPT}],
        "id": str(uuid4()),
    }
    first = await http.post(JOBS, json=fields)
    head.finish(head.claim())
    second = await http.post(JOBS, json=fields)
    assert (first.status_code, first.json()["state"]) == (202, "queued")
    assert (second.status_code, second.json()["state"]) == (200, "succeeded")


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


async def test_states_tell_what_a_cancel_did(http: httpx.AsyncClient, head: TinyHead) -> None:
    running = await submit(http)
    sequence = head.claim()
    queued = await submit(http)
    assert (await http.delete(f"{JOBS}/{queued}")).json()["state"] == "cancelled"
    assert (await http.delete(f"{JOBS}/cmpl-{running}")).json()["state"] == "running"
    assert head.beat(sequence)
    head.end(sequence, JobState.CANCELLED)
    (event,) = await read(http, running)
    assert (event.data["state"], event.data["cancel_requested"]) == ("cancelled", True)
    assert (await http.delete(f"{JOBS}/{uuid4()}")).status_code == 404


async def test_listed_pages_follow_each_other(http: httpx.AsyncClient) -> None:
    ids = [await submit(http) for _ in range(3)]
    first = (await http.get(JOBS, params={"limit": 2, "model": "clerk", "state": "queued"})).json()
    assert ([job["id"] for job in first["data"]], first["has_more"]) == (ids[:0:-1], True)
    for after in (first["data"][-1]["id"], first["next"]):
        second = (await http.get(JOBS, params={"limit": 2, "after": after})).json()
        assert ([job["id"] for job in second["data"]], second["has_more"], second["next"]) == (
            ids[:1],
            False,
            None,
        )


async def test_no_job_is_left_out_when_the_last_job_of_a_page_is_deleted(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    ids = [await submit(http) for _ in range(3)]
    first = (await http.get(JOBS, params={"limit": 2})).json()
    with head.database.begin() as connection:
        connection.execute(text("DELETE FROM jobs WHERE id = :id"), {"id": ids[1]})
    second = (await http.get(JOBS, params={"after": first["next"]})).json()
    assert [job["id"] for job in second["data"]] == ids[:1]
    reply = await http.get(JOBS, params={"after": ids[1]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "after")


@pytest.mark.parametrize("query", ["stat=failed", "limit=1&limit=2"])
async def test_a_wrong_listing_query_names_its_parameter(
    http: httpx.AsyncClient, query: str
) -> None:
    reply = await http.get(f"{JOBS}?{query}")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, query.partition("=")[0])


async def test_listing_large_jobs_does_not_read_their_bodies(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    await submit(http, metadata={"note": "x" * 10_000})
    head.finish(head.claim())
    reply = await http.get(JOBS)
    (job,) = reply.json()["data"]
    assert (job["prompt_start"], job["finish_reason"], job["object"]) == (PROMPT, "stop", "job")
    assert job["usage"]["total_tokens"] > job["usage"]["completion_tokens"] > 0
    assert job.keys().isdisjoint({"prompt", "prompt_token_ids", "result", "metadata", "params"})
    assert len(reply.content) < 1_000


@pytest.mark.parametrize(
    ("method", "path", "status", "param"),
    [
        ("GET", f"{JOBS}/{UNKNOWN}", 404, None),
        ("GET", f"{JOBS}/{UNKNOWN}/events", 404, None),
        ("GET", f"{JOBS}/x", 400, "id"),
        ("DELETE", f"{JOBS}/x", 400, "id"),
        ("GET", f"{JOBS}?limit=0", 400, "limit"),
        ("GET", f"{JOBS}?limit=x", 400, "limit"),
        ("GET", f"{JOBS}?state=x", 400, "state"),
        ("GET", f"{JOBS}?after=x", 400, "after"),
        ("GET", "/v1/nothing", 404, None),
        ("PUT", JOBS, 405, None),
        ("GET", "/v1/models/none", 404, "model"),
    ],
)
async def test_a_wrong_request_is_answered_with_openais_error_body(
    http: httpx.AsyncClient, method: str, path: str, *, status: int, param: str | None
) -> None:
    reply = await http.request(method, path)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (status, param)
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]


@pytest.mark.parametrize(
    ("fields", "status", "param", "words"),
    [
        ({"model": "other"}, 404, "model", "Use one of: clerk"),
        ({"prompt": ""}, 400, "prompt", "empty"),
        ({"prompt": [1] * 500, "max_tokens": 13}, 400, "max_tokens", "at most 12"),
        ({"prompt": [1, 896]}, 400, "prompt[1]", "vocabulary of 896"),
        ({"prompt": "a\0"}, 400, "prompt", "NUL"),
        ({"color": 1}, 400, "color", "unknown field"),
        ({"id": "x"}, 400, "id", "UUID"),
        ({"tenant": "nobody"}, 403, "tenant", "your API key"),
        ({"tenant": 1}, 400, "tenant", "docs/jobs.md"),
        ({"metadata": "x"}, 400, "metadata", "docs/jobs.md"),
        ({"stream": True}, 400, "stream", "docs/jobs.md"),
    ],
)
async def test_a_wrong_job_names_field_limit_and_remedy(
    http: httpx.AsyncClient, fields: dict[str, Any], status: int, *, param: str, words: str
) -> None:
    reply = await http.post(JOBS, json={"model": "clerk", "prompt": PROMPT, **fields})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (status, param)
    assert words in error["message"]
    assert (await http.get(JOBS)).json()["data"] == []
