"""Limits of a tenant over HTTP: what a caller learns, and what a killed gateway has taken."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from shardline.store.tenants import quotas
from shardline_server.failpoints import ArmedPoint, Point
from tests.chaos.faults.arming import Arming
from tests.integration.gateway.running_gateway import JOBS, PROMPT
from tests.integration.gateway.test_gateway_process import gateway_process
from tests.tiny_head import tiny_head


async def test_a_gateway_killed_before_its_answer_has_taken_one_request(
    database_url: str, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDLINE_FAILPOINTS", str(tmp_path))
    body = {"model": "clerk", "prompt": PROMPT, "idempotency_key": "one"}
    with tiny_head(database_url, redis_url) as head:
        with head.database.begin() as connection:
            quotas.set_quota(connection, "default", {"requests_per_min": 1})
        arming = Arming(tmp_path, Point.GATEWAY_INSERTED, ArmedPoint(action="kill"))
        async with gateway_process(database_url, redis_url) as (process, http):
            with pytest.raises(httpx.HTTPError):
                await http.post(JOBS, json=body)
            await asyncio.to_thread(process.wait, 60)
        assert arming.num_strikes == 1
        arming.disarm()
        async with gateway_process(database_url, redis_url) as (_, http):
            repeat = await http.post(JOBS, json=body)
            refused = await http.post(JOBS, json={**body, "idempotency_key": "two"})
        with head.database.begin() as connection:
            (used,) = quotas.list_quotas(connection)
    assert repeat.is_success
    assert (used.requests, used.queued) == (1, 1)
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("rate_limit_exceeded", "requests_per_min")
    assert 0 < int(refused.headers["Retry-After"]) <= 61
    assert int(refused.headers["retry-after-ms"]) <= 61_000
    assert refused.headers["x-ratelimit-limit-requests"] == "1"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
