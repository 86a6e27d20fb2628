"""The native door over real HTTP, Postgres and Valkey: jobs are stored, repeated, cancelled and
listed."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx
import psycopg
import pytest
from sqlalchemy import text

from shardline.contract.ids import derived_id
from shardline.contract.job import JobState
from shardline_server.store import crashes
from tests.integration.gateway.running_gateway import JOBS, PROMPT, read, submit
from tests.tiny_head import TinyHead

UNKNOWN = "00000000-0000-4000-8000-000000000000"


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
        {"weights": "f1"},
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
        ({"id": str(derived_id("of another"))}, 400, "id", "of version 8"),
        ({"prompt": [1] * 500, "max_tokens": 13}, 400, "max_tokens", "at most 12"),
        ({"prompt": [1, 896]}, 400, "prompt[1]", "vocabulary of 896"),
        ({"prompt": "a\0"}, 400, "prompt", "NUL"),
        ({"color": 1}, 400, "color", "unknown field"),
        ({"id": "x"}, 400, "id", "UUID"),
        ({"tenant": "nobody"}, 403, "tenant", "your API key"),
        ({"tenant": 1}, 400, "tenant", "docs/jobs.md"),
        ({"metadata": "x"}, 400, "metadata", "docs/jobs.md"),
        ({"stream": True}, 400, "stream", "docs/jobs.md"),
        ({"retry": {"max_attempts": 33}}, 400, "retry.max_attempts", "<= 32"),
        (
            {"retry": {"max_attempts": 2, "on": ["expired"]}},
            400,
            "retry.on[0]",
            "crashed, engine",
        ),
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


async def test_a_jobs_policy_attempts_and_next_attempt_are_shown(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    policy = {"max_attempts": 4, "backoff_s": 60.0, "max_backoff_s": 600.0, "on": ["crashed"]}
    fields = {"model": "clerk", "prompt": PROMPT, "retry": {"max_attempts": 4, "backoff_s": 60}}
    job_id = (await http.post(JOBS, json=fields)).json()["id"]
    head.claim()
    job = (await http.get(f"{JOBS}/{job_id}")).json()
    assert (job["attempts"], job["retry"], job["next_attempt_at"]) == (1, policy, None)
    with head.database.begin() as connection:
        assert crashes.requeue_or_fail_held(connection, [(UUID(job_id), 1)])
    job = (await http.get(f"{JOBS}/{job_id}")).json()
    moments = [datetime.fromisoformat(job[name]) for name in ("created_at", "next_attempt_at")]
    assert (job["state"], job["crashes"]) == ("queued", 1)
    assert moments[1] - moments[0] >= timedelta(seconds=30)


async def test_a_job_that_waits_for_others_says_so(
    http: httpx.AsyncClient, head: TinyHead, database_url: str
) -> None:
    parent = (await http.post(JOBS, json={"model": "clerk", "prompt": PROMPT})).json()["id"]
    waiting = {"model": "clerk", "prompt": "{{a}}", "depends_on": [{"job": parent, "as": "a"}]}
    reply = await http.post(JOBS, json={**waiting, "idempotency_key": "k"})
    assert reply.status_code == 202
    again = await http.post(JOBS, json={**waiting, "idempotency_key": "k"})
    assert (again.status_code, again.json()["id"]) == (200, reply.json()["id"])
    job = (await http.get(f"{JOBS}/{reply.json()['id']}")).json()
    assert (job["waits_for"], job["depends_on"]) == ([parent], waiting["depends_on"])
    assert (job["state"], job["prompt_token_ids"]) == ("queued", None)
    listed = (await http.get(JOBS)).json()["data"]
    assert [one["waits_for_parents"] for one in listed] == [True, False]

    for wrong in (
        {**waiting, "depends_on": [{"job": UNKNOWN, "as": "a"}]},
        {**waiting, "prompt": "none"},
        {"model": "clerk", "prompt": "a", "on_parent_failure": "run"},
    ):
        refused = await http.post(JOBS, json=wrong)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] in ("depends_on", "on_parent_failure")


@pytest.mark.parametrize(
    "route", ["completions", "chat/completions", "responses", "messages", "decisions", "embeddings"]
)
async def test_doors_with_a_caller_on_the_line_refuse_it_by_name(
    http: httpx.AsyncClient, route: str
) -> None:
    said = {"messages": [{"role": "user", "content": PROMPT}]}
    texts: dict[str, dict[str, Any]] = {
        "completions": {"prompt": PROMPT},
        "chat/completions": said,
        "messages": {**said, "max_tokens": 4},
    }
    body: dict[str, Any] = {"model": "clerk", **texts.get(route, {"input": PROMPT})}
    body["depends_on"] = [{"job": UNKNOWN}]
    reply = await http.post(f"/v1/{route}", json=body)
    assert reply.status_code == 400
    assert "depends_on" in reply.text
