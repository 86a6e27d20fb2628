"""The audit log at the gateway: acts have the key that did them, and only operators read them."""

from __future__ import annotations

from typing import Any

import httpx

from shardline.contract.api_key import Scope, bearer, parse_key
from tests.integration.gateway.running_gateway import (
    JOBS,
    PAUSES,
    SCHEDULES,
    WEBHOOKS,
    make_key,
)

AUDIT = "/v1/audit"


async def acts(http: httpx.AsyncClient, **query: Any) -> list[dict[str, Any]]:
    reply = await http.get(AUDIT, params=query)
    assert reply.status_code == 200, reply.text
    found: list[dict[str, Any]] = reply.json()["data"]
    return found


async def test_each_act_has_the_key_that_did_it_and_no_secret(
    http: httpx.AsyncClient, database_url: str
) -> None:
    key = make_key(database_url, tenant="acme")
    headers = bearer(key)
    actor = f"key {parse_key(key).key_id}"
    hook = {"url": "https://example.org/", "name": "hooks", "event_types": ["job.*"]}
    made = (await http.post(WEBHOOKS, json=hook, headers=headers)).json()
    one = f"{WEBHOOKS}/{made['id']}"
    rotated = (await http.post(f"{one}/rotate_secret", json={}, headers=headers)).json()
    await http.post(one, json={"name": "other"}, headers=headers)
    await http.delete(one, headers=headers)
    plan = {"name": "daily", "cron": "0 7 * * *", "request": {"model": "clerk", "prompt": "hidden"}}
    schedule = (await http.post(SCHEDULES, json=plan, headers=headers)).json()
    planned = f"{SCHEDULES}/{schedule['id']}"
    await http.post(planned, json={"paused": True}, headers=headers)
    await http.delete(planned, headers=headers)
    await http.post(PAUSES, json={"kind": "tenant", "target": "acme"}, headers=headers)
    await http.delete(f"{PAUSES}/tenant/acme", headers=headers)
    await http.post(JOBS, json={"model": "clerk", "prompt": "a"}, headers=headers)
    await http.post(f"{JOBS}/cancel", json={"filter": {"model": "clerk"}}, headers=headers)
    found = (await acts(http, actor=actor))[::-1]
    assert [(one["object_kind"], one["act"]) for one in found] == [
        *(("webhook endpoint", act) for act in ("create", "rotate", "change", "delete")),
        *(("schedule", act) for act in ("create", "pause", "delete")),
        *(("pause", act) for act in ("pause", "resume")),
        ("jobs", "cancel"),
    ]
    assert found[-1]["change"] == {"jobs": 1, "asked": {"tenant": "acme", "model": "clerk"}}
    assert found[-1]["tenant"] == "acme"
    for secret in (made["signing_secret"], rotated["signing_secret"], key, "hidden"):
        assert secret not in str(found)


async def test_the_log_is_for_operators_in_pages(
    http: httpx.AsyncClient, database_url: str
) -> None:
    others = make_key(database_url, tenant="other", scopes=(Scope.READ, Scope.SUBMIT, Scope.CANCEL))
    assert (await http.get(AUDIT, headers=bearer(others))).status_code == 403
    for target in ("a", "b"):
        await http.post(PAUSES, json={"kind": "tenant", "target": target})
    first = (await http.get(AUDIT, params={"limit": 1, "act": "pause"})).json()
    assert (first["data"][0]["object_id"], first["has_more"]) == ("tenant b", True)
    (second,) = await acts(http, limit=1, act="pause", after=first["last_id"])
    assert second["object_id"] == "tenant a"
    assert await acts(http, since=99_999_999_999) == []
    for wrong in ({"limit": 0}, {"after": 10**11}, {"since": "now"}, {"actr": "a"}):
        assert (await http.get(AUDIT, params=wrong)).status_code == 400
