"""Many jobs at once over real HTTP: the filter's border is the key's tenant, and what one request
changes is bounded."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from sqlalchemy import text

from shardline.contract.api_key import bearer
from shardline.store import bulk_acts
from tests.integration.gateway.route_requests import check_refusal
from tests.integration.gateway.running_gateway import JOBS, make_key, submit
from tests.tiny_head import TinyHead

CANCEL = f"{JOBS}/cancel"
RETRY = f"{JOBS}/retry"
PRIORITIZE = f"{JOBS}/prioritize"
ALL = {"filter": {"model": "clerk"}}


async def change(http: httpx.AsyncClient, path: str, **fields: Any) -> tuple[int, bool]:
    """How many were changed, and whether there are more."""
    reply = await http.post(path, json={**ALL, **fields})
    assert reply.status_code == 200, reply.text
    assert reply.json()["object"] == "jobs.changed"
    return reply.json()["changed"], reply.json()["has_more"]


async def states(http: httpx.AsyncClient) -> list[str]:
    """Of all jobs of the tenant, newest first."""
    return [job["state"] for job in (await http.get(JOBS)).json()["data"]]


async def test_many_jobs_are_cancelled_and_submitted_again(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    await submit(http)
    held = head.claim()
    for _ in range(3):
        await submit(http, metadata={"team": "a"})
    team = {"filter": {"metadata": {"team": "a"}, "state": "queued"}}
    assert await change(http, CANCEL, **team, dry_run=True) == (3, False)
    assert await states(http) == ["queued"] * 3 + ["running"]

    assert await change(http, CANCEL, **team) == (3, False)
    assert await states(http) == ["cancelled"] * 3 + ["running"]
    assert not head.beat(held)

    assert await change(http, CANCEL) == (1, False)
    assert head.beat(held), "a running one hears of it as of DELETE"
    assert await change(http, CANCEL) == (0, False)

    assert await change(http, RETRY, filter={"state": "cancelled"}) == (3, False)
    assert (await states(http))[:3] == ["queued"] * 3


async def test_one_request_changes_so_many_and_says_that_there_are_more(
    http: httpx.AsyncClient, head: TinyHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_acts, "PAGE_ROWS", 1)
    monkeypatch.setattr("services.gateway.client.MAX_PAGES", 2)
    for _ in range(3):
        await submit(http)
    assert await change(http, PRIORITIZE, priority=1) == (2, True)
    assert await change(http, PRIORITIZE, priority=1) == (1, False)
    assert {job["priority"] for job in (await http.get(JOBS)).json()["data"]} == {1}


@pytest.mark.parametrize("path", [CANCEL, RETRY, PRIORITIZE])
async def test_no_act_reaches_another_tenant(
    http: httpx.AsyncClient, head: TinyHead, database_url: str, path: str
) -> None:
    mine = await submit(http)
    if path == RETRY:
        with head.database.begin() as connection:
            connection.execute(text("UPDATE jobs SET state = 'failed', finished_at = now()"))
    before = (await http.get(f"{JOBS}/{mine}")).json()
    theirs = bearer(make_key(database_url, tenant="other"))
    more = {"priority": 1} if path == PRIORITIZE else {}
    for where in ({"model": "clerk"}, {"ids": [mine]}, {"tenant": "other"}):
        reply = await http.post(path, json={"filter": where, **more}, headers=theirs)
        assert (reply.status_code, reply.json()["changed"]) == (200, 0), reply.text
    for where in ({"tenant": "default"}, {"tenant": "nobody"}):
        reply = await http.post(path, json={"filter": where, **more}, headers=theirs)
        check_refusal(reply, 403, "permission_denied", str(where))
    empty: dict[str, Any]
    for empty in ({}, {"metadata": {}}, {"state": "succeeded"}):
        reply = await http.post(path, json={"filter": empty, **more})
        check_refusal(reply, 400, "invalid_value", str(empty))
    assert (await http.get(f"{JOBS}/{mine}")).json() == before
    assert len(await states(http)) == 1


async def test_a_retry_is_counted_by_the_key_that_asks(
    http: httpx.AsyncClient, head: TinyHead, database_url: str
) -> None:
    await submit(http)
    with head.database.begin() as connection:
        connection.execute(text("UPDATE jobs SET state = 'failed', finished_at = now()"))
    key = bearer(make_key(database_url, name="night shift"))
    reply = await http.post(RETRY, json=ALL, headers=key)
    assert reply.json()["changed"] == 1
    with head.database.begin() as connection:
        names = connection.scalars(text("SELECT key_name FROM jobs WHERE replay_of IS NOT NULL"))
        assert list(names) == ["night shift"]
