"""Webhook endpoints by OpenAI's own client, and by `shardline webhooks`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from typer.testing import CliRunner

from shardline.cli.commands import cli
from shardline.contract.webhooks.event import EventType
from tests.integration.gateway.running_gateway import SAMPLES_ARE_TAKEN
from tests.tiny_head import TinyHead

URL = "https://example.org/hooks"
EVENTS: Any = ["batch.completed", "response.failed"]


@pytest.fixture
async def client(http: httpx.AsyncClient) -> AsyncIterator[AsyncOpenAI]:
    key = http.headers["authorization"].removeprefix("Bearer ")
    async with AsyncOpenAI(base_url=f"{http.base_url}/v1/", api_key=key, max_retries=0) as client:
        yield client


async def test_openais_client_makes_changes_rotates_tries_and_deletes_endpoints(
    client: AsyncOpenAI, head: TinyHead
) -> None:
    hooks = client.webhooks
    assert (await hooks.event_types.list()).data == list(EventType)
    made = await hooks.create(url=URL, name="hooks", event_types=EVENTS)
    assert made.signing_secret.startswith("whsec_")
    assert made.signing_secret_hint == f"whsec_…{made.signing_secret[-4:]}"
    second = await hooks.create(url=f"{URL}/2", name="2", event_types=EVENTS)
    assert [one.id async for one in await hooks.list(limit=1)] == [second.id, made.id]
    changed = await hooks.update(made.id, name="other")
    assert (changed.name, changed.url, changed.event_types) == ("other", URL, sorted(EVENTS)[::-1])
    rotated = await hooks.rotate_secret(made.id, keep_old_secret_active_for_24_hours=True)
    assert rotated.signing_secret != made.signing_secret
    with pytest.raises(openai.ConflictError, match="two secrets"):
        await hooks.rotate_secret(made.id, keep_old_secret_active_for_24_hours=True)
    assert (await hooks.rotate_secret(made.id)).signing_secret
    with head.database.begin() as connection:
        connection.execute(SAMPLES_ARE_TAKEN)
    tried = await hooks.test(made.id, event_type="batch.failed")
    assert (tried.status_code, tried.webhook_endpoint_id) == (204, made.id)
    shown = (await hooks.retrieve(made.id)).to_json()
    assert "signing_secret_hint" in shown
    assert rotated.signing_secret not in shown
    assert (await hooks.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await hooks.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="no public address"):
        await hooks.create(url="http://169.254.169.254/", name="a", event_types=EVENTS)


async def test_what_an_endpoint_was_sent_is_listed_in_pages_and_replayed(
    http: httpx.AsyncClient, client: AsyncOpenAI, head: TinyHead
) -> None:
    made = await client.webhooks.create(url=URL, name="hooks", event_types=EVENTS)
    with head.database.begin() as connection:
        connection.exec_driver_sql(
            "SELECT shardline_tell_webhooks('default', 'batch.completed', gen_random_uuid())"
            " FROM generate_series(1, 3);"
            "UPDATE webhook_deliveries SET state = 'dead', due_at = NULL, ended_at = now()"
        )
    route = f"/v1/webhook_endpoints/{made.id}"
    pages: list[Any] = []
    after: dict[str, str] = {}
    while not pages or pages[-1]["has_more"]:
        reply = await http.get(
            f"{route}/deliveries", params={"limit": "2", "state": "dead", **after}
        )
        pages.append(reply.json())
        after = {"after": pages[-1]["last_id"]}
    found = [one for page in pages for one in page["data"]]
    assert (len(pages), len({one["id"] for one in found})) == (2, 3)
    assert found[0]["object_id"].startswith("batch_")
    one = await http.post(f"{route}/replay", json={"ids": [found[0]["id"]]})
    rest = await http.post(f"{route}/replay", json={})
    assert [reply.json()["replayed"] for reply in (one, rest)] == [1, 2]
    assert (await http.post(route, json={"enabled": False})).json()["disabled_reason"]
    assert (await http.post(f"{route}/replay", json={})).status_code == 409
    assert (await http.post(f"{route}/test", json={"event_type": "job.failed"})).status_code == 409


def test_commands_add_list_change_rotate_and_remove(database_url: str) -> None:
    def run(*arguments: str, code: int = 0) -> str:
        ran = CliRunner().invoke(
            cli, ["webhooks", *arguments], env={"SHARDLINE_DATABASE_URL": database_url}
        )
        assert ran.exit_code == code, ran.output
        return ran.stdout

    made = json.loads(run("add", URL, "-e", "job.*", "--tenant", "acme", "--json"))
    (listed,) = map(json.loads, run("list", "--tenant", "acme", "--json").splitlines())
    assert (listed["name"], listed["tenant"], len(listed["event_types"])) == (
        "example.org",
        "acme",
        4,
    )
    assert made["signing_secret"] not in run("list") + run("list", "--json")
    rotated = json.loads(run("rotate", made["id"], "--json"))
    assert rotated["signing_secret"] != made["signing_secret"]
    run("rotate", made["id"], code=2)
    assert "disabled by its owner" in run("change", made["id"], "--disable")
    run("replay", made["id"], code=2)
    assert "enabled" in run("change", made["id"], "--enable", "--url", f"{URL}/b")
    assert run("replay", made["id"]) == "0 sent again\n"
    assert run("deliveries", made["id"], "--json") == ""
    run("add", "http://127.0.0.1/", code=2)
    assert "removed" in run("remove", made["id"])
    assert run("list", "--json") == ""
