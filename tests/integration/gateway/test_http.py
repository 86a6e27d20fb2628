"""HTTP as clients of every kind speak it: HEAD, slashes, request ids, pages of other origins,
encodings, numbers."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from tests.integration.gateway.running_gateway import PROMPT, running_gateway
from tests.tiny_head import TinyHead

JOBS = "/v1/jobs"
BODY = {"model": "clerk", "prompt": PROMPT}
JSON = {"Content-Type": "application/json"}
REQUEST_ID = "x-request-id"


@pytest.fixture
def head(database_url: str, redis_url: str) -> Iterator[TinyHead]:
    head = TinyHead(database_url, redis_url)
    yield head
    head.close()


@pytest.fixture
async def nobody(http: httpx.AsyncClient) -> AsyncIterator[httpx.AsyncClient]:
    """A caller without a key."""
    async with httpx.AsyncClient(base_url=http.base_url, timeout=60) as nobody:
        yield nobody


@pytest.mark.parametrize("path", ["/health", "/ready", "/health/", "/ready/"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_health_checks_of_every_kind_are_answered_without_a_key(
    nobody: httpx.AsyncClient, head: TinyHead, method: str, path: str
) -> None:
    head.ready()
    reply = await nobody.request(method, path)
    assert (reply.status_code, reply.content == b"") == (200, method == "HEAD")
    assert int(reply.headers["content-length"]) > 0


async def test_head_answers_as_get_without_a_body(http: httpx.AsyncClient) -> None:
    job = f"{JOBS}/{(await http.post(JOBS, json=BODY)).json()['id']}"
    for path in (
        "/v1/models",
        "/v1/models/clerk",
        job,
        JOBS,
        "/v1/costs",
        "/metrics",
        "/openapi.json",
    ):
        asked = await http.head(path)
        whole = await http.get(path)
        assert (asked.status_code, asked.content) == (200, b""), path
        assert asked.headers["content-type"] == whole.headers["content-type"]
    assert (await http.head(f"{JOBS}/x")).status_code == 400
    assert (await http.head(f"{job}/events")).status_code == 405
    assert (await http.head("/v1/responses/resp_x?stream=true")).status_code == 405
    assert (await http.get("/health")).status_code == 200


async def test_a_slash_at_the_end_changes_nothing(http: httpx.AsyncClient, head: TinyHead) -> None:
    assert (await http.get("/v1/models/")).json() == (await http.get("/v1/models")).json()
    assert (await http.get("/v1/models/clerk/")).json()["id"] == "clerk"
    assert (await http.post(f"{JOBS}/", json=BODY)).status_code == 202
    with head.serving():
        assert (await http.post("/v1/completions/", json=BODY)).status_code == 200


async def test_every_answer_has_a_request_id_of_its_own(
    http: httpx.AsyncClient, nobody: httpx.AsyncClient
) -> None:
    job = (await http.post(JOBS, json=BODY)).json()["id"]
    replies = [
        await nobody.get("/health"),
        await nobody.get("/ready"),
        await nobody.get("/v1/models"),
        await nobody.get("/v1/models", headers={"Host": "elsewhere"}),
        await http.get("/v1/models"),
        await http.get("/v1/models/none"),
        await http.get(JOBS),
        await http.get(f"{JOBS}/{job}"),
        await http.get("/nowhere"),
        await http.put(JOBS),
        await http.post(JOBS, content=b"x", headers=JSON),
        await http.post(JOBS, content=b"x"),
        await http.post(JOBS, json={**BODY, "top_p": 7}),
        await http.delete(f"{JOBS}/{job}"),
        await http.get("/metrics"),
    ]
    ids = [reply.headers[REQUEST_ID] for reply in replies]
    assert len(set(ids)) == len(replies)


@pytest.mark.parametrize("given", ["order-17", "0f8fad5b-d9cb-469f-a165-70867728950e", "a" * 128])
async def test_a_callers_request_id_is_given_back(
    http: httpx.AsyncClient, head: TinyHead, given: str
) -> None:
    headers = {"X-Request-Id": given}
    for path in ("/v1/models", "/nowhere", "/health"):
        assert (await http.get(path, headers=headers)).headers[REQUEST_ID] == given
    with head.serving():
        reply = await http.post("/v1/completions", json=BODY, headers=headers)
    assert (reply.headers[REQUEST_ID], reply.headers.get_list(REQUEST_ID)) == (given, [given])
    assert reply.json()["id"].startswith("cmpl-")


@pytest.mark.parametrize("given", ["", "a b", "<script>", "a" * 129, "\xe9"])
async def test_a_request_id_that_is_none_is_replaced(http: httpx.AsyncClient, given: str) -> None:
    reply = await http.get("/health", headers=[(b"X-Request-Id", given.encode("latin-1"))])
    assert reply.headers[REQUEST_ID] not in ("", given)


ORIGIN = "https://chat.example.org"
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


async def test_pages_of_an_allowed_origin_may_ask(
    database_url: str, redis_url: str, head: TinyHead
) -> None:
    settings = {"http_allowed_origins": f"https://other.example.org, {ORIGIN}"}
    async with running_gateway(database_url, redis_url, **settings) as http:
        async with httpx.AsyncClient(base_url=http.base_url) as page:
            asked = await page.options("/v1/chat/completions", headers=PREFLIGHT)
            refused = await page.get("/v1/models", headers={"Origin": ORIGIN})
            private = await page.options(
                "/v1/models",
                headers={**PREFLIGHT, "Access-Control-Request-Private-Network": "true"},
            )
            foreign = await page.options(
                "/v1/chat/completions", headers={**PREFLIGHT, "Origin": "https://evil.example"}
            )
        accepted = await http.post(JOBS, json=BODY, headers={"Origin": ORIGIN})
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, ORIGIN)
    allowed = private.headers["access-control-allow-private-network"]
    assert (private.status_code, allowed) == (200, "true")
    assert {"POST", "DELETE"} <= set(asked.headers["access-control-allow-methods"].split(", "))
    assert "x-stainless-lang" in asked.headers["access-control-allow-headers"]
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)
    assert (accepted.status_code, accepted.headers["access-control-allow-origin"]) == (202, ORIGIN)
    assert REQUEST_ID in accepted.headers["access-control-expose-headers"]
    assert (foreign.status_code, "access-control-allow-origin" in foreign.headers) == (400, False)
    assert all(REQUEST_ID in reply.headers for reply in (asked, refused, accepted, foreign))


async def test_no_page_may_ask_unless_a_setting_says_so(http: httpx.AsyncClient) -> None:
    asked = await http.options(JOBS, headers=PREFLIGHT)
    answered = await http.get("/v1/models", headers={"Origin": ORIGIN})
    assert asked.status_code == 405
    assert not any(
        name.startswith("access-control") for reply in (asked, answered) for name in reply.headers
    )


ENCODED = {
    "UTF-8 with a byte order mark": (b"\xef\xbb\xbf" + json.dumps(BODY).encode(), 202, ""),
    "UTF-16": (json.dumps(BODY).encode("utf-16"), 400, "UTF-16"),
    "UTF-16 without a mark": (json.dumps(BODY).encode("utf-16-le"), 400, "UTF-16"),
    "UTF-32": (json.dumps(BODY).encode("utf-32"), 400, "UTF-32"),
    "Latin-1": (b'{"model": "clerk", "prompt": "caf\xe9"}', 400, "UTF-8"),
    "gzip": (gzip.compress(json.dumps(BODY).encode()), 400, "gzip"),
    "half a surrogate pair": (b'{"model": "clerk", "prompt": "a \\ud83d b"}', 400, "prompt: "),
    "another half": (
        b'{"model": "clerk", "messages": [{"role": "user", "content": "\\udc00"}]}',
        400,
        "messages[0].content: ",
    ),
    "a whole pair": (b'{"model": "clerk", "prompt": "sum: \\ud83d\\ude00"}', 202, ""),
    "no JSON": (b"{'model': 1}", 400, "not a JSON object"),
}


@pytest.mark.parametrize(("content", "status", "named"), ENCODED.values(), ids=ENCODED)
async def test_the_encoding_of_a_body_is_read_or_named(
    http: httpx.AsyncClient, content: bytes, status: int, named: str
) -> None:
    reply = await http.post(JOBS, content=content, headers=JSON)
    assert reply.status_code == status, reply.text
    assert status == 202 or named in reply.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip"])
async def test_a_packed_body_is_refused_by_the_name_of_its_encoding(
    http: httpx.AsyncClient, encoding: str
) -> None:
    packed = gzip.compress(json.dumps(BODY).encode())
    reply = await http.post(JOBS, content=packed, headers={**JSON, "Content-Encoding": encoding})
    assert (reply.status_code, reply.json()["error"]["param"]) == (415, "content-encoding")
    assert encoding in reply.json()["error"]["message"]
    assert (
        await http.post(JOBS, json=BODY, headers={"Content-Encoding": "identity"})
    ).status_code == 202


WRONG_QUERIES = (
    "/v1/jobs?limit=0000000000019999999",
    "/v1/jobs?limit=" + "9" * 5000,
    "/v1/jobs?limit=201",
    "/v1/jobs?limit=",
    "/v1/jobs?limit=0",
    "/v1/jobs?limit=-1",
    "/v1/jobs?limit=%D9%A1",
    "/v1/jobs?model=%00",
    "/v1/jobs?after=%00",
    "/v1/costs?model=%00",
    "/v1/costs?days=000000000001999999999999",
    "/v1/costs?days=" + "0" * 5000,
    "/v1/models/%00",
)


@pytest.mark.parametrize("path", WRONG_QUERIES)
async def test_a_wrong_query_is_the_callers_error(http: httpx.AsyncClient, path: str) -> None:
    assert (await http.get(path)).status_code in (400, 404)


async def test_zeros_before_a_number_change_nothing(http: httpx.AsyncClient) -> None:
    for _ in range(3):
        await http.post(JOBS, json=BODY)
    assert len((await http.get("/v1/jobs?limit=" + "0" * 4000 + "2")).json()["data"]) == 2


@pytest.mark.parametrize(
    "field", ["tools", "suffix", "stop", "metadata", "logit_bias", "unknown", "stream", "prompt"]
)
@pytest.mark.parametrize("depth", [400, 900, 960, 1_000, 4_000])
async def test_deep_nesting_anywhere_is_the_callers_error(
    http: httpx.AsyncClient, field: str, depth: int
) -> None:
    nested = b"[" * depth + b"]" * depth
    content = b'{"model": "clerk", "prompt": "a", "' + field.encode() + b'": ' + nested + b"}"
    for route in ("/v1/completions", JOBS):
        reply = await http.post(route, content=content, headers=JSON)
        assert reply.status_code == 400, reply.text


async def test_an_error_quotes_little_of_what_was_sent(http: httpx.AsyncClient) -> None:
    reply = await http.post(JOBS, json={**BODY, "x" * 100_000: 1})
    assert reply.status_code == 400
    assert len(reply.content) < 4_000


async def test_an_invalid_traceparent_header_refuses_no_request(http: httpx.AsyncClient) -> None:
    for header in ("x" * 300, "00-0", ""):
        reply = await http.post(JOBS, json=BODY, headers={"traceparent": header})
        assert reply.status_code == 202, reply.text


async def test_a_body_that_grows_when_it_is_decoded_takes_the_room_of_what_it_becomes(
    database_url: str, redis_url: str, head: TinyHead
) -> None:
    async with running_gateway(database_url, redis_url, http_max_buffered_bytes=4 << 20) as http:
        bomb = b'{"model": "clerk", "messages": [' + b"{}," * 20_000 + b"{}]}"
        metadata = (
            b'{"model": "clerk", "prompt": "a", "metadata": {"a": [' + b"{}," * 25_000 + b"{}]}}"
        )
        refused = await http.post(JOBS, content=bomb, headers=JSON)
        named = await http.post(JOBS, content=metadata, headers=JSON)
        ordinary = await http.post(JOBS, json={**BODY, "metadata": {"a": "b" * 60_000}})
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")
    assert (named.status_code, named.json()["error"]["param"]) == (400, "metadata")
    assert ordinary.status_code == 202, ordinary.text
