"""A real gateway on a real port, in the test's own event loop, API keys for it, and readers of what
it sends.

`running_gateway` gives a client that sends a key of the tenant `default` with every scope. Another
one:

    other = make_key(database_url, tenant="other")  # all scopes, no end
    reader = make_key(database_url, scopes=(Scope.READ,), expires_s=60.0)
    await http.get("/v1/jobs", headers=bearer(other))  # instead of the client's own
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
from sqlalchemy import text

from services.gateway.http.server import GatewayServer
from services.gateway.settings import GatewaySettings
from services.standalone.ports import free_port
from shardline.contract.api_key import bearer
from shardline.store import api_keys
from shardline.store.api_keys import Grant
from shardline.store.connection.database import connect
from tests.integration.gateway.api_document import check_answer
from tests.tiny_head import Sequence, TinyHead

JOBS = "/v1/jobs"
CHATS = "/v1/chat/completions"
RESPONSES = "/v1/responses"
FILES = "/v1/files"
BATCHES = "/v1/batches"
WEBHOOKS = "/v1/webhook_endpoints"
SCHEDULES = "/v1/schedules"
PAUSES = "/v1/pauses"
PROMPT = "sum: 1 + 2 ="
COMMENT = "a comment"
SAMPLES_ARE_TAKEN = text("""
CREATE OR REPLACE FUNCTION samples_are_taken() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.state = 'delivered';
    NEW.due_at = NULL;
    NEW.ended_at = now();
    NEW.status_code = 204;
    RETURN NEW;
END
$$;
CREATE OR REPLACE TRIGGER samples_are_taken BEFORE INSERT ON webhook_deliveries
    FOR EACH ROW WHEN (NEW.is_test) EXECUTE FUNCTION samples_are_taken();
""")
"""As if a relay had sent each at once."""


def gateway_server(database_url: str, redis_url: str, **settings: Any) -> GatewayServer:
    """A gateway on a free port, to be served and stopped by the caller."""
    values = {
        "database_url": database_url,
        "redis_url": redis_url,
        "http_port": free_port(),
        **settings,
    }
    return GatewayServer(GatewaySettings(**values))


async def one_of_each(http: httpx.AsyncClient, head: TinyHead) -> dict[str, str]:
    """A value for each parameter in the paths of routes: of a job that waits, a stored completion,
    a response in the background that waits, a file, a batch of it, a webhook endpoint, a schedule,
    what is paused, and the model."""
    chat = {"model": "clerk", "messages": [{"role": "user", "content": PROMPT}], "store": True}
    with head.serving():
        stored = await http.post(CHATS, json=chat)
    background = {"model": "clerk", "input": PROMPT, "background": True}
    response = await http.post(RESPONSES, json=background)
    job = await http.post(JOBS, json={"model": "clerk", "prompt": PROMPT})
    # Nobody ends the wait of its only line, so the batch stays one that can be cancelled.
    waits = {"model": "clerk", "messages": chat["messages"], "delay_s": 3600}
    line = {"custom_id": "a", "method": "POST", "url": CHATS, "body": waits}
    form: Any = {
        "files": {"file": ("in.jsonl", json.dumps(line).encode())},
        "data": {"purpose": "batch"},
    }
    # The batch's own may not be deleted while it is read.
    file, read = [await http.post(FILES, **form) for _ in range(2)]
    asked = {"input_file_id": read.json()["id"], "endpoint": CHATS, "completion_window": "24h"}
    batch = await http.post(BATCHES, json=asked)
    with head.database.begin() as connection:
        connection.execute(SAMPLES_ARE_TAKEN)
    # A tenant may not have many.
    endpoints = (await http.get(WEBHOOKS)).json()["data"]
    if not endpoints:
        told = {"url": "https://example.org/", "name": "hooks", "event_types": ["batch.*"]}
        endpoints = [(await http.post(WEBHOOKS, json=told)).json()]
    body = {"model": "clerk", "prompt": PROMPT}
    planned = {"name": uuid4().hex, "cron": "0 7 * * *", "request": body}
    schedule = await http.post(SCHEDULES, json=planned)
    pause = await http.post(PAUSES, json={"kind": "tag", "target": f"a={uuid4().hex}"})
    replies = (stored, response, job, file, batch, schedule, pause)
    assert [reply.is_success for reply in replies] == [True] * 7
    return {
        "job_id": job.json()["id"],
        "completion_id": stored.json()["id"],
        "response_id": response.json()["id"],
        "file_id": file.json()["id"],
        "batch_id": batch.json()["id"],
        "webhook_endpoint_id": endpoints[0]["id"],
        "schedule_id": schedule.json()["id"],
        "kind": pause.json()["kind"],
        "target": pause.json()["target"],
        "name": "clerk",
    }


@asynccontextmanager
async def running_gateway(
    database_url: str, redis_url: str, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway that answers, with a key of its own. Each answer is held to the API's
    description."""
    server = gateway_server(database_url, redis_url, **settings)
    task = asyncio.create_task(server.serve())
    address = f"http://127.0.0.1:{server.config.port}"
    headers = bearer(make_key(database_url))
    options: Any = {
        "limits": httpx.Limits(max_connections=64),
        "event_hooks": {"response": [check_answer]},
    }
    try:
        async with httpx.AsyncClient(
            base_url=address, headers=headers, timeout=60, **options
        ) as client:
            await _until_it_answers(client, task)
            yield client
    finally:
        server.should_exit = True
        await task


def make_key(database_url: str, **grant: Any) -> str:
    """A new API key; `grant` are the fields of `Grant`."""
    engine = connect(database_url)
    try:
        with engine.begin() as connection:
            return api_keys.create(connection, Grant(**{"name": uuid4().hex, **grant}))
    finally:
        engine.dispose()


async def claimed(head: TinyHead) -> Sequence:
    """The next job, as soon as it is stored."""
    async with asyncio.timeout(30):
        while not (sequences := await asyncio.to_thread(head.claim_all)):
            await asyncio.to_thread(head.wait_for_bell)
    return sequences[0]


async def submit(http: httpx.AsyncClient, **fields: Any) -> str:
    """A new job's id."""
    reply = await http.post(JOBS, json={"model": "clerk", "prompt": PROMPT, **fields})
    assert reply.status_code == 202, reply.text
    return str(reply.json()["id"])


async def until_shown(http: httpx.AsyncClient, figure: str) -> None:
    """The gateway's figures say so."""
    async with asyncio.timeout(30):
        while figure not in (await http.get("/metrics")).text:
            pass


def until_one_waits(head: TinyHead) -> None:
    """Some session of Postgres waits for a table."""
    with head.database.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        while not connection.scalar(
            text("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation IS NOT NULL")
        ):
            pass


async def _until_it_answers(client: httpx.AsyncClient, task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(30):
        while not task.done():
            try:
                await client.get("/health")
            except httpx.ConnectError:
                await asyncio.wait({task}, timeout=0.01)
            else:
                return
    task.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One server-sent event."""

    name: str | None
    event_id: str | None
    data: Any


async def events_of(
    response: httpx.Response, *, with_comments: bool = False
) -> AsyncIterator[Event]:
    """Events by the rules of the format; `[DONE]` stays text."""
    fields: dict[str, str] = {}
    async for line in response.aiter_lines():
        if line.startswith(":") and with_comments:
            yield Event(name=COMMENT, event_id=None, data=line)
        elif line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            if "data" in fields:
                data = fields["data"]
                yield Event(
                    name=fields.get("event"),
                    event_id=fields.get("id"),
                    data=data if data == "[DONE]" else json.loads(data),
                )
            fields = {}


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
