"""Nobody without a key: each route of the app itself, against each way in which a key may not do.

The routes come from the app: a new one is tested as it is added, and fails here until it says which
scope it wants.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from inspect import iscoroutinefunction
from typing import Any
from uuid import uuid4

import httpx
import pytest
from sqlalchemy import text

from services.gateway.guard import OPEN
from services.standalone.ports import free_port
from services.standalone.servers import Postgres
from shardline.contract.api_key import Scope, bearer, new_key, parse_key
from shardline.store import api_keys
from shardline.store.connection.database import connect
from tests.api_keys import secret_of
from tests.integration.gateway.app_routes import GUARDED, calls_of, routes, scopes_of
from tests.integration.gateway.route_requests import (
    BODY,
    CHAT,
    DECISIONS,
    ENCODERS,
    ask,
    check_refusal,
    status_of,
)
from tests.integration.gateway.running_gateway import (
    PROMPT,
    make_key,
    one_of_each,
    running_gateway,
)
from tests.tiny_head import TinyHead

JOBS = "/v1/jobs"
OTHER_TENANT = "other"
UUID_TEXT = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@pytest.fixture
async def http(
    database_url: str, redis_url: str, head: TinyHead
) -> AsyncIterator[httpx.AsyncClient]:
    """What Postgres says of a key holds for this request alone."""
    async with running_gateway(database_url, redis_url, http_key_fresh_s=0) as http:
        yield http


@contextmanager
def key_rows(database_url: str) -> Iterator[Any]:
    """A transaction on the keys."""
    engine = connect(database_url)
    try:
        with engine.begin() as connection:
            yield connection
    finally:
        engine.dispose()


def revoked(database_url: str) -> str:
    """A key that was valid."""
    key = make_key(database_url)
    with key_rows(database_url) as rows:
        api_keys.revoke(rows, parse_key(key).key_id)
    return key


def expired(database_url: str) -> str:
    """A key whose time is over by Postgres's clock."""
    key = make_key(database_url, expires_s=60.0)
    with key_rows(database_url) as rows:
        rows.execute(
            text("UPDATE api_keys SET expires_at = now() WHERE id = :id"),
            {"id": parse_key(key).key_id},
        )
    return key


def with_another_secret(key: str) -> str:
    """The id of one key and the secret of another."""
    return key.removesuffix(secret_of(key)) + secret_of(new_key())


def path_of(template: str, values: Mapping[str, str]) -> str:
    """One that exists."""
    return template.replace(":path}", "}").format_map(values)


def test_no_route_hops_to_a_thread() -> None:
    """FastAPI calls a plain function on a thread, which costs a request more than the rest of the
    gateway does."""
    calls = {call for _, _, route in routes() for call in calls_of(route.dependant)}
    assert [
        call
        for call in calls
        if not iscoroutinefunction(call) and not iscoroutinefunction(type(call).__call__)
    ] == []


def test_every_route_but_the_probes_wants_a_scope() -> None:
    wanted = {(method, path): scopes_of(route.dependant) for method, path, route in routes()}
    assert (
        {path for (_, path), scopes in wanted.items() if not scopes}
        == OPEN
        == {"/health", "/ready"}
    )
    assert all(scopes <= set(Scope) for scopes in wanted.values())
    assert set().union(*wanted.values()) == set(Scope)
    assert wanted["DELETE", f"{JOBS}/{{job_id}}"] == {"cancel"}
    assert wanted["GET", "/metrics"] == {"admin"}


async def test_each_route_says_why_it_refuses_a_key_and_nothing_else(
    http: httpx.AsyncClient, head: TinyHead, database_url: str
) -> None:
    mine = await one_of_each(http, head)
    num_jobs = len((await http.get(JOBS)).json()["data"])
    valid = make_key(database_url)
    nobodies = {
        "no key": {"Authorization": ""},
        "another scheme": {"Authorization": f"Basic {valid}"},
        "no scheme": {"Authorization": valid},
        "malformed": bearer("sk-shardline-x"),
        "cut off": bearer(valid[:-1]),
        "two keys": bearer(f"{valid} {valid}"),
        "unknown": bearer(new_key()),
        "wrong secret": bearer(with_another_secret(valid)),
        "expired": bearer(expired(database_url)),
        "revoked": bearer(revoked(database_url)),
    }
    for (method, template, _), (name, headers) in itertools.product(GUARDED, nobodies.items()):
        reply = await ask(http, method, path_of(template, mine), headers)
        check_refusal(reply, 401, "invalid_api_key", f"{method} {template} with {name}")
        assert ("invalid_token" in reply.headers["www-authenticate"]) == (name != "no key")
    assert len((await http.get(JOBS)).json()["data"]) == num_jobs


async def test_each_route_is_forbidden_without_its_scope_and_allowed_with_it(
    http: httpx.AsyncClient, head: TinyHead, database_url: str
) -> None:
    for method, template, route in GUARDED:
        (wanted,) = scopes_of(route.dependant)
        others = make_key(database_url, scopes=tuple(scope for scope in Scope if scope != wanted))
        mine = await one_of_each(http, head)
        reply = await ask(http, method, path_of(template, mine), bearer(others))
        check_refusal(reply, 403, "permission_denied", f"{method} {template} without {wanted}")
        assert f'scope="{wanted}"' in reply.headers["www-authenticate"]
        assert f"lacks the scope '{wanted}'" in reply.text
        alone = bearer(make_key(database_url, scopes=(Scope(wanted),)))
        # The one answer that is neither a stream nor there before its jobs have ended.
        with head.serving() if template == DECISIONS else nullcontext():
            path = path_of(template, mine)
            status = await status_of(http, method, path, alone, file_id=mine["file_id"])
        assert status in ((400,) if template in ENCODERS else (200, 202)), f"{method} {template}"


async def test_readiness_tells_details_only_to_a_caller_with_a_key(
    http: httpx.AsyncClient, database_url: str
) -> None:
    nobody = {"Authorization": ""}
    stranger = bearer(new_key())
    reply = await ask(http, "GET", "/ready", nobody)
    assert (reply.status_code, reply.json()) == (200, {"ready": True})
    for scope in Scope:
        reply = await ask(http, "GET", "/ready", bearer(make_key(database_url, scopes=(scope,))))
        assert (reply.status_code, list(reply.json()["models"])) == (200, ["clerk"]), scope
    check_refusal(
        await ask(http, "GET", "/ready", stranger), 401, "invalid_api_key", "a key that nobody has"
    )
    assert (await ask(http, "GET", "/health", stranger)).status_code == 200


async def test_another_tenants_job_is_not_there_by_any_route(
    http: httpx.AsyncClient, head: TinyHead, database_url: str
) -> None:
    each = await one_of_each(http, head)
    theirs = bearer(make_key(database_url, tenant=OTHER_TENANT))
    with_id = [(method, path) for method, path, _ in GUARDED if "_id}" in path]
    assert len(with_id) == 26
    for method, template in with_id:
        nothing = {name: UUID_TEXT.sub(str(uuid4()), value) for name, value in each.items()}
        seen, absent = [
            await ask(http, method, path_of(template, values), theirs) for values in (each, nothing)
        ]
        check_refusal(seen, 404, "not_found", f"{method} {template}")
        assert UUID_TEXT.sub("", seen.text) == UUID_TEXT.sub("", absent.text)
    mine = each["job_id"]
    assert (await http.get(JOBS, headers=theirs)).json()["data"] == []
    assert (await http.get(f"{JOBS}/{mine}")).json()["state"] == "queued", "it was not cancelled"
    own = await job_of(http, headers=theirs)
    listed = (await http.get(JOBS, headers=theirs)).json()["data"]
    assert [(job["id"], job["tenant"]) for job in listed] == [(own, OTHER_TENANT)]
    # Nor is another tenant's job a place to go on from.
    for headers, after in ((theirs, mine), (theirs, str(uuid4())), (None, own)):
        reply = await http.get(JOBS, headers=headers, params={"after": after})
        check_refusal(reply, 400, "invalid_value", "after another tenant's job, and after none")


@pytest.mark.parametrize(
    ("path", "body"),
    [(JOBS, BODY), ("/v1/completions", BODY), ("/v1/chat/completions", CHAT)],
    ids=lambda each: each,
)
async def test_naming_another_tenant_than_the_keys_is_forbidden(
    http: httpx.AsyncClient, database_url: str, *, path: str, body: dict[str, Any]
) -> None:
    theirs = bearer(make_key(database_url, tenant=OTHER_TENANT))
    reply = await http.post(path, json={**body, "tenant": "default"}, headers=theirs)
    check_refusal(reply, 403, "permission_denied", path)
    assert reply.json()["error"]["param"] == "tenant"
    assert (await http.get(JOBS)).json()["data"] == []
    own = await http.post(JOBS, json={**BODY, "tenant": OTHER_TENANT}, headers=theirs)
    assert (await http.get(f"{JOBS}/{own.json()['id']}", headers=theirs)).json()[
        "tenant"
    ] == OTHER_TENANT


async def test_another_tenants_id_or_key_tells_nothing_of_its_job(
    http: httpx.AsyncClient, head: TinyHead, database_url: str
) -> None:
    theirs = bearer(make_key(database_url, tenant=OTHER_TENANT))
    body = {**BODY, "id": str(uuid4()), "idempotency_key": "k"}
    assert (await http.post(JOBS, json=body)).status_code == 202
    head.finish(head.claim())
    same, other = [
        await http.post(path, json={**body, "prompt": prompt}, headers=theirs)
        for path, prompt in ((JOBS, PROMPT), ("/v1/completions", "another"))
    ]
    check_refusal(same, 409, "conflict", "the same content")
    assert same.json() == other.json(), "whether the content is the same may not be seen"
    mine = await http.post(JOBS, json={**BODY, "idempotency_key": "k"}, headers=theirs)
    assert (mine.status_code, mine.json()["state"]) == (202, "queued"), (
        "keys of a request belong to its tenant"
    )


async def test_remembered_keys_are_served_without_postgres_and_others_told_to_wait(
    http: httpx.AsyncClient, head: TinyHead, database_url: str, postgres_server: Postgres
) -> None:
    unread = make_key(database_url)
    assert (await http.get("/openapi.json")).status_code == 200
    postgres_server.kill()
    try:
        assert (await http.get("/openapi.json")).status_code == 200
        reply = await http.get("/openapi.json", headers=bearer(unread))
        check_refusal(reply, 503, "unavailable", "a key that nobody has read")
        assert reply.headers["retry-after"] == "1"
    finally:
        postgres_server.restart()
    async with asyncio.timeout(60):
        while (await http.get("/openapi.json", headers=bearer(unread))).status_code != 200:
            await asyncio.to_thread(head.wait_for_bell)


async def test_a_revoked_key_is_trusted_no_longer_than_it_is_fresh(
    database_url: str, redis_url: str, head: TinyHead
) -> None:
    key = make_key(database_url)
    async with running_gateway(database_url, redis_url, http_key_fresh_s=60) as http:
        assert (await http.get(JOBS, headers=bearer(key))).status_code == 200
        with key_rows(database_url) as rows:
            api_keys.revoke(rows, parse_key(key).key_id)
        assert (await http.get(JOBS, headers=bearer(key))).status_code == 200
    async with running_gateway(database_url, redis_url, http_key_fresh_s=0) as http:
        assert (await http.get(JOBS, headers=bearer(key))).status_code == 401


async def test_the_use_of_a_key_is_stored_after_the_request(
    database_url: str, redis_url: str, head: TinyHead
) -> None:
    used = make_key(database_url)
    idle = make_key(database_url)
    async with running_gateway(database_url, redis_url) as http:
        await http.get(JOBS, headers=bearer(used))
        await http.get(JOBS, headers=bearer(with_another_secret(idle)))
    with key_rows(database_url) as rows:
        last_used = {key.id: key.last_used_at for key in api_keys.list_keys(rows)}
    assert last_used[parse_key(used).key_id] is not None
    assert last_used[parse_key(idle).key_id] is None


async def test_metrics_on_their_own_port_need_no_key(
    database_url: str, redis_url: str, head: TinyHead
) -> None:
    port = free_port()
    async with (
        running_gateway(database_url, redis_url, metrics_port=port),
        httpx.AsyncClient() as anybody,
    ):
        reply = await anybody.get(f"http://127.0.0.1:{port}/metrics")
    assert (reply.status_code, "shardline_http_requests" in reply.text) == (200, True)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "", "127.0.0.1.evil.example", "[::2]"]
)
async def test_a_request_under_a_foreign_host_name_is_refused(
    http: httpx.AsyncClient, host: str
) -> None:
    reply = await http.get(JOBS, headers={"Host": host})
    check_refusal(reply, 421, "misdirected_request", host)
    assert (await http.get("/health", headers={"Host": host})).status_code == 200


async def test_the_gateway_answers_under_its_configured_names(
    database_url: str, redis_url: str, head: TinyHead
) -> None:
    async with running_gateway(
        database_url, redis_url, http_allowed_hosts="Shardline.example, other"
    ) as http:
        statuses = {
            host: (await http.get(JOBS, headers={"Host": host})).status_code
            for host in (
                "shardline.example",
                "OTHER:443",
                "localhost:1",
                "[::1]:8000",
                "evil.example",
            )
        }
    assert statuses == {
        "shardline.example": 200,
        "OTHER:443": 200,
        "localhost:1": 200,
        "[::1]:8000": 200,
        "evil.example": 421,
    }


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"]
)
async def test_a_body_that_a_form_could_send_is_refused(
    http: httpx.AsyncClient, head: TinyHead, kind: str
) -> None:
    content = b'{"model": "clerk", "prompt": "a"}'
    mine = await one_of_each(http, head)
    for _, template, route in GUARDED:
        if "requestBody" in (route.openapi_extra or {}):
            path = path_of(template, mine)
            reply = await http.post(path, content=content, headers={"Content-Type": kind})
            check_refusal(reply, 415, "unsupported_media_type", path)
    good = await http.post(
        JOBS, content=content, headers={"Content-Type": "Application/JSON; charset=utf-8"}
    )
    assert good.status_code == 202


async def job_of(http: httpx.AsyncClient, headers: dict[str, str] | None = None) -> str:
    """A job that waits."""
    reply = await http.post(JOBS, json=BODY, headers=headers)
    assert reply.status_code == 202, reply.text
    return str(reply.json()["id"])
