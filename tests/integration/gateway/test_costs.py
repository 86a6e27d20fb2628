"""Costs over HTTP: the caller's own, by model and day, and queries that are refused by name."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import httpx
import pytest
from sqlalchemy import text

from shardline.contract.api_key import bearer
from tests.integration.gateway.running_gateway import (
    PROMPT,
    make_key,
    until_one_waits,
)
from tests.tiny_head import TinyHead, energy_j

BODY = {"model": "clerk", "prompt": PROMPT}


async def test_costs_are_those_of_the_callers_tenant(
    http: httpx.AsyncClient, head: TinyHead, database_url: str
) -> None:
    for headers in ({}, bearer(make_key(database_url, tenant="other"))):
        await http.post("/v1/jobs", json=BODY, headers=headers)
        head.finish(head.claim())

    (row,) = (await http.get("/v1/costs")).json()["data"]
    told = {
        "model": "clerk",
        "tenant": None,
        "day": None,
        "num_jobs": 1,
        "num_unknown": 0,
        "sources": ["table"],
    }
    assert {name: row[name] for name in told} == told
    took_j = energy_j(row["prompt_tokens"], row["completion_tokens"])
    assert row["kwh"] == pytest.approx(took_j / 3.6e6)
    assert row["cost"] is None
    (row,) = (await http.get("/v1/costs", params={"by": "model,day", "days": "1"})).json()["data"]
    assert (row["model"], row["day"]) == ("clerk", datetime.now(UTC).date().isoformat())


@pytest.mark.parametrize("params", [{"by": "tenant"}, {"days": "0"}, {"tenant": "other"}])
async def test_a_wrong_query_of_costs_is_refused_by_name(
    http: httpx.AsyncClient, params: dict[str, str]
) -> None:
    reply = await http.get("/v1/costs", params=params)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, next(iter(params)))


async def test_jobs_are_listed_while_one_tenant_asks_for_costs_in_vain(
    http: httpx.AsyncClient, head: TinyHead, database_url: str
) -> None:
    # Given costs that are slow, and a tenant that asks for more than there are connections for
    # lists
    await http.post("/v1/jobs", json=BODY)
    with head.database.begin() as connection:
        connection.execute(text("LOCK TABLE energy_rates IN ACCESS EXCLUSIVE MODE"))
        asking = [
            asyncio.create_task(http.get("/v1/costs", params={"days": str(1 + days)}))
            for days in range(8)
        ]
        await asyncio.to_thread(until_one_waits, head)

        # When others, and the tenant itself, list jobs, they are answered
        other = bearer(make_key(database_url, tenant="other"))
        assert (await http.get("/v1/jobs", headers=other)).json()["data"] == []
        assert len((await http.get("/v1/jobs")).json()["data"]) == 1
        assert not any(one.done() for one in asking)
    assert {reply.status_code for reply in await asyncio.gather(*asking)} == {200}
