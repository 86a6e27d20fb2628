"""The gateway as operators see it: readiness, figures, limits and batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from sqlalchemy import text

from services.standalone.servers import Postgres
from shardline.contract.api_key import bearer, new_key
from shardline.store import models
from tests.integration.gateway.running_gateway import (
    JOBS,
    PROMPT,
    events_of,
    running_gateway,
    until_one_waits,
    until_shown,
)
from tests.tiny_head import TinyHead

JSON = {"Content-Type": "application/json"}
BODY = {"model": "clerk", "prompt": PROMPT}


@pytest.fixture
def head(database_url: str, redis_url: str) -> Iterator[TinyHead]:
    head = TinyHead(database_url, redis_url)
    yield head
    head.close()


async def test_the_gateway_is_ready_when_a_pipeline_is(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    reply = await http.get("/ready")
    assert (reply.status_code, reply.json()["ready"]) == (503, False)
    assert reply.json()["models"]["clerk"]["ready"] is False
    head.ready()
    reply = await http.get("/ready")
    assert (reply.status_code, reply.json()["ready"]) == (200, True)
    assert reply.json()["models"]["clerk"]["pipelines"][0]["stages"] == [{"layers": "0-7"}]
    assert (await http.get("/health")).json() == {"status": "ok"}


async def test_each_listed_model_shows_its_limit(http: httpx.AsyncClient, head: TinyHead) -> None:
    (model,) = (await http.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"], model["max_model_len"], model["ready"]) == (
        "clerk",
        "model",
        512,
        False,
    )
    assert (await http.get("/v1/models/clerk")).json() == model


async def test_adapters_are_listed_behind_their_model_and_take_jobs(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    # Given a head that says it has an adapter
    with head.database.begin() as connection:
        models.register_adapters(connection, "clerk", {"legal": "0123456789abcdef" * 4})

    # When a caller lists models, asks for the adapter, and for one that nobody has
    listed = (await http.get("/v1/models")).json()["data"]
    accepted = await http.post(JOBS, json={**BODY, "model": "clerk:legal"})
    refused = await http.post(JOBS, json={**BODY, "model": "clerk:medical"})

    # Then it is there with its parent, the job is the model's, with the adapter, and the other is
    # refused by name
    assert [(one["id"], one["root"], one["parent"]) for one in listed] == [
        ("clerk", "clerk", None),
        ("clerk:legal", "clerk", "clerk"),
    ]
    assert listed[1]["system_fingerprint"] == f"{listed[0]['system_fingerprint']}_0123456789abcdef"
    assert (await http.get("/v1/models/clerk:legal")).json() == listed[1]
    assert (accepted.status_code, accepted.json()["model"]) == (202, "clerk:legal")
    job = (await http.get(f"{JOBS}/{accepted.json()['id']}")).json()
    assert (job["model"], job["params"]["adapter"]) == ("clerk", "legal")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert "clerk, clerk:legal" in refused.json()["error"]["message"]


async def test_a_pipelines_kv_below_the_context_limits_requests(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    head.ready(kv_tokens=64)

    (model,) = (await http.get("/v1/models")).json()["data"]
    accepted = await http.post(JOBS, json={"model": "clerk", "prompt": [5] * 20})
    refused = await http.post(JOBS, json={"model": "clerk", "prompt": [5] * 20, "max_tokens": 45})

    assert model["max_model_len"] == 64
    assert head.claim().claimed.max_tokens == 44, accepted.text
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    assert "64 tokens" in refused.json()["error"]["message"]


async def test_the_api_description_knows_fields_limits_and_keys(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    for name in ("CompletionRequest", "ChatCompletionRequest", "JobRequest"):
        assert schemas[name]["properties"]["temperature"]["maximum"] == 2.0
    assert schemas["ChatCompletionRequest"]["properties"]["tools"]["maxItems"] == 128
    assert document["components"]["securitySchemes"]["API key"]["scheme"] == "bearer"
    assert document["paths"][JOBS]["get"]["security"] == [{"API key": ["read"]}]
    assert document["paths"]["/ready"]["get"]["security"] == [{}, {"API key": []}]
    assert "security" not in document["paths"]["/health"]["get"]


async def test_metrics_count_routes_and_not_paths(http: httpx.AsyncClient) -> None:
    await http.post(JOBS, json=BODY)
    await http.get(f"{JOBS}/x")
    text = (await http.get("/metrics")).text
    assert 'shardline_http_requests_total{method="POST",route="/v1/jobs",status="202"} 1.0' in text
    assert 'route="/v1/jobs/{job_id}",status="400"' in text
    assert 'shardline_jobs_accepted_total{model="clerk"} 1.0' in text
    assert 'shardline_jobs_refused_total{code="invalid_value"} 1.0' in text


async def test_one_wrong_request_harms_none_of_many_concurrent_callers(
    http: httpx.AsyncClient,
) -> None:
    bodies = [{**BODY, "metadata": {"a": "\0"}} if place % 10 == 3 else BODY for place in range(60)]
    replies = await asyncio.gather(*(http.post(JOBS, json=body) for body in bodies))
    assert [reply.status_code for reply in replies] == [
        400 if place % 10 == 3 else 202 for place in range(60)
    ]
    assert len({reply.json()["id"] for reply in replies if reply.status_code == 202}) == 54


async def test_conflicting_requests_travel_with_the_others_of_their_transaction(
    http: httpx.AsyncClient,
) -> None:
    # Given a job, and many who ask for something else under its id
    taken = (await http.post(JOBS, json=BODY)).json()["id"]
    conflicting = {"model": "clerk", "prompt": "another", "id": taken}
    bodies = [conflicting if place % 3 == 0 else BODY for place in range(60)]

    # When they come with others
    replies = await asyncio.gather(*(http.post(JOBS, json=body) for body in bodies))

    # Then each has its own answer, and no transaction was repeated without them
    assert [reply.status_code for reply in replies] == [
        409 if place % 3 == 0 else 202 for place in range(60)
    ]
    assert "shardline_insert_batch_jobs_sum 61.0" in (await http.get("/metrics")).text


async def test_jobs_are_taken_while_many_ask_whether_the_gateway_is_ready(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    # Given a Postgres that does not tell which pipelines there are, and more callers who ask than
    # there are connections
    assert (await http.post(JOBS, json=BODY)).status_code == 202
    with head.database.begin() as connection:
        connection.execute(text("LOCK TABLE pipelines IN ACCESS EXCLUSIVE MODE"))
        asking = [asyncio.create_task(http.get("/ready")) for _ in range(40)]
        await asyncio.to_thread(until_one_waits, head)

        # When others submit, they are answered
        assert [(await http.post(JOBS, json=BODY)).status_code for _ in range(10)] == [202] * 10
        assert not any(one.done() for one in asking)
    assert {reply.status_code for reply in await asyncio.gather(*asking)} == {503}


async def test_a_caller_at_a_full_door_is_told_when_to_retry(
    database_url: str, redis_url: str, head: TinyHead
) -> None:
    async with running_gateway(database_url, redis_url, http_max_in_flight=1) as http:
        fields = {**BODY, "stream": True, "return_token_ids": True}
        async with http.stream("POST", "/v1/completions", json=fields) as stream:
            await anext(events_of(stream))
            reply = await http.post(JOBS, json=BODY)
            assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
            assert reply.json()["error"]["code"] == "overloaded"
            assert (await http.get("/health")).status_code == 200


async def test_jobs_are_taken_while_followers_are_at_their_limit(
    database_url: str, redis_url: str, head: TinyHead
) -> None:
    async with running_gateway(
        database_url, redis_url, http_max_in_flight=1, http_max_followers=1
    ) as http:
        job_id = (await http.post(JOBS, json=BODY)).json()["id"]
        async with http.stream("GET", f"{JOBS}/{job_id}/events", timeout=60) as stream:
            assert stream.status_code == 200
            assert (await http.post(JOBS, json=BODY)).status_code == 202
            reply = await http.get(f"{JOBS}/{job_id}/events")
            assert (reply.status_code, reply.json()["error"]["code"]) == (429, "overloaded")


async def test_a_body_over_the_limit_is_refused(
    database_url: str, redis_url: str, head: TinyHead
) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b" " * 600

    async with running_gateway(database_url, redis_url, http_max_body_bytes=1024) as http:
        for content in (b" " * 1025, chunks()):
            reply = await http.post(JOBS, content=content, headers=JSON)
            assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
        assert (await http.post(JOBS, json=BODY)).status_code == 202


async def test_a_caller_whose_body_never_comes_is_told_in_time(
    database_url: str, redis_url: str, head: TinyHead
) -> None:
    async with running_gateway(database_url, redis_url, http_body_timeout_s=0.05) as http:
        reader, writer = await asyncio.open_connection("127.0.0.1", http.base_url.port)
        lines = [
            "POST /v1/jobs HTTP/1.1",
            "Host: localhost",
            "Content-Length: 9",
            "Content-Type: application/json",
        ]
        request = "\r\n".join([*lines, f"Authorization: {http.headers['authorization']}", "", "{"])
        writer.write(request.encode())
        assert b" 408 " in await reader.readline()
        writer.close()


@pytest.mark.parametrize("depth", [40, 400, 4_000])
async def test_deep_nesting_is_refused_like_any_wrong_field(
    http: httpx.AsyncClient, depth: int
) -> None:
    nested = b"[" * depth + b"]" * depth
    content = b'{"model": "clerk", "prompt": "a", "metadata": {"a": ' + nested + b"}}"
    reply = await http.post(JOBS, content=content, headers=JSON)
    assert reply.status_code == 400, reply.text


async def test_a_job_is_told_to_retry_while_postgres_is_away(
    http: httpx.AsyncClient, head: TinyHead, postgres_server: Postgres
) -> None:
    assert (await http.post(JOBS, json=BODY)).status_code == 202
    postgres_server.kill()
    try:
        reply = await http.post(JOBS, json=BODY)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
        assert reply.json()["error"]["message"] == "Postgres cannot be reached"
        reply = await http.get("/ready")
        assert (reply.status_code, reply.json()["reason"]) == (503, "Postgres cannot be reached")
        async with httpx.AsyncClient(base_url=http.base_url) as nobody:
            reply = await nobody.get("/ready")
            assert (reply.status_code, reply.json()) == (503, {"ready": False})
            reply = await nobody.get("/v1/models", headers=bearer(new_key()))
        assert reply.status_code == 503
        assert str(postgres_server.sockets) not in reply.text, "nobody learns where Postgres is"
        assert (await http.get("/health")).status_code == 200
    finally:
        postgres_server.restart()
    async with asyncio.timeout(60):
        while (await http.post(JOBS, json=BODY)).status_code != 202:
            await asyncio.to_thread(head.wait_for_bell)


async def test_only_received_bytes_of_announced_bodies_take_room(
    database_url: str, redis_url: str, head: TinyHead
) -> None:
    limits = {"http_max_body_bytes": 4096, "http_max_buffered_bytes": 8192}
    async with running_gateway(database_url, redis_url, **limits) as http:
        head_lines = (
            f"Host: 127.0.0.1\r\nAuthorization: {http.headers['authorization']}\r\n"
            "Content-Type: application/json\r\n"
        )
        idle = [await asyncio.open_connection("127.0.0.1", http.base_url.port) for _ in range(4)]
        for number, (_, writer) in enumerate(idle):
            size = "Content-Length: 4096" if number % 2 else "Transfer-Encoding: chunked"
            writer.write(f"POST /v1/jobs HTTP/1.1\r\n{head_lines}{size}\r\n\r\n".encode())
        await until_shown(http, f"shardline_http_in_flight {len(idle)}.0")
        assert (await http.post(JOBS, json=BODY)).status_code == 202
        for number in (1, 3):
            idle[number][1].write(b" " * 4000)
        large = {**BODY, "prompt": "a" * 400}
        async with asyncio.timeout(30):
            while (reply := await http.post(JOBS, json=large)).status_code == 202:
                pass
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "overloaded")
        for _, writer in idle:
            writer.close()
