"""What one connection may take from the others: heads, time, files, pipelined requests, unread
answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from shardline.contract.job import JobState
from tests.integration.gateway.running_gateway import PROMPT, claimed, running_gateway
from tests.tiny_head import TinyHead

BODY = b'{"model": "clerk", "prompt": "sum: 1 + 2 ="}'
ROUND_B = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(http: httpx.AsyncClient) -> AsyncIterator[Connection]:
    """A connection of bytes, closed at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", http.base_url.port)
    try:
        async with asyncio.timeout(60):
            yield reader, writer
    finally:
        writer.close()


def request(http: httpx.AsyncClient, route: str, body: bytes = BODY, *lines: str) -> bytes:
    """A whole POST of a caller with a key."""
    head_lines = [
        f"POST {route} HTTP/1.1",
        "Host: localhost",
        f"Authorization: {http.headers['authorization']}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *lines,
    ]
    return "\r\n".join([*head_lines, "", ""]).encode() + body


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of the next answer of known length."""
    head_lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    length = next(
        int(line.split(":")[1]) for line in head_lines if line.startswith("content-length")
    )
    return int(head_lines[0].split(" ")[1]), await reader.readexactly(length)


async def write_until_refused(writer: asyncio.StreamWriter, piece: bytes, num_bytes: int) -> None:
    """Send so much, or as much as is taken."""
    try:
        for _ in range(num_bytes // len(piece)):
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        return


async def figure(http: httpx.AsyncClient, name: str) -> float:
    """One sample of the gateway's metrics, 0 while there is none."""
    lines = (await http.get("/metrics")).text.splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(name + " ")), 0.0)


async def until_figure(http: httpx.AsyncClient, name: str, value: float) -> None:
    """Wait for a sample of the gateway's metrics."""
    async with asyncio.timeout(60):
        while await figure(http, name) != value:
            pass


ENDLESS = {
    "lines": (b"GET /health HTTP/1.1\r\n", b"a: b\r\n" * 1000),
    "one header": (b"GET /health HTTP/1.1\r\nCookie: ", b"x" * 4096),
    "one name": (b"GET /health HTTP/1.1\r\n", b"x" * 4096),
    "the URL": (b"GET /", b"x" * 4096),
    "empty lines": (b"", b"\r\n" * 1000),
    "trailers": (
        b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
        b"a: b\r\n" * 1000,
    ),
    "an extension of a chunk": (
        b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5;",
        b"x" * 4096,
    ),
}


@pytest.mark.parametrize(("opening", "piece"), ENDLESS.values(), ids=ENDLESS)
async def test_a_head_without_end_is_cut_off(
    http: httpx.AsyncClient, opening: bytes, piece: bytes
) -> None:
    async with connected(http) as (reader, writer):
        writer.write(opening)
        await write_until_refused(writer, piece, 128 << 20)
        with_answers = b"".join([chunk async for chunk in chunks(reader)])
    # The connection was cut after 32 MiB at most, and who reads is told why.
    assert with_answers == b"" or b" 431 " in with_answers or b" 401 " in with_answers
    assert await figure(http, "shardline_http_connections") == 1


async def chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """All that comes before the connection ends."""
    try:
        while chunk := await reader.read(65536):
            yield chunk
    except ConnectionError:
        return


async def test_a_head_over_the_limit_is_refused_in_openais_form(http: httpx.AsyncClient) -> None:
    too_long = await http.get("/health", headers={"Cookie": "x" * (64 << 10)})
    too_many = await http.get("/health", headers=[("a", "b")] * 300)
    fits = await http.get("/health", headers={"Cookie": "x" * (60 << 10)})
    assert (too_long.status_code, too_many.status_code, fits.status_code) == (431, 431, 200)
    assert too_long.json()["error"]["code"] == "request_head_too_large"
    assert too_long.headers["x-request-id"] != too_many.headers["x-request-id"]


async def test_what_is_no_http_is_refused_in_openais_form(http: httpx.AsyncClient) -> None:
    for sent in (b"\x16\x03\x01 hello\r\n\r\n", b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n"):
        async with connected(http) as (reader, writer):
            writer.write(sent)
            status, body = await answer(reader)
            assert (status, b'"bad_request"' in body, await reader.read()) == (400, True, b"")


async def test_a_half_head_is_refused_in_time_and_a_silent_connection_closed(
    database_url: str, redis_url: str, head: TinyHead
) -> None:
    async with running_gateway(database_url, redis_url, http_head_timeout_s=0.05) as http:
        async with connected(http) as (silent, _), connected(http) as (reader, writer):
            writer.write(ROUND_B[:-2])
            assert (await answer(reader))[0] == 408
            assert await silent.read() == b""
        async with connected(http) as (reader, writer):
            writer.write(ROUND_B)
            assert (await answer(reader))[0] == 200
            writer.write(ROUND_B[:10])
            assert (await answer(reader))[0] == 408


async def test_half_heads_make_room_for_whole_requests(
    database_url: str, redis_url: str, head: TinyHead
) -> None:
    limits = {"http_max_connections": 16, "http_head_timeout_s": 3600.0}
    async with running_gateway(database_url, redis_url, **limits) as http:
        # Given a request under way, and three times as many half heads as there may be connections
        waiting = asyncio.create_task(
            http.post("/v1/completions", json={"model": "clerk", "prompt": PROMPT})
        )
        sequence = await claimed(head)
        halves = []
        for _ in range(48):
            reader, writer = await asyncio.open_connection("127.0.0.1", http.base_url.port)
            writer.write(ROUND_B[:-2])
            halves.append((reader, writer))
            # When others ask, they are answered
            assert (await http.get("/health")).status_code == 200
        assert await figure(http, "shardline_http_connections") <= 16
        # Then the oldest are closed, and the request under way was not cut
        assert await halves[0][0].read() == b""
        head.say(sequence)
        head.finish(sequence)
        assert (await waiting).status_code == 200
        assert await figure(http, 'shardline_http_connections_closed_total{reason="limit"}') >= 32
        for _, writer in halves:
            writer.close()


async def test_an_idle_connection_makes_room_for_a_new_one(
    database_url: str, redis_url: str, head: TinyHead
) -> None:
    async with running_gateway(database_url, redis_url, http_max_connections=16) as http:
        idle = []
        for _ in range(32):
            reader, writer = await asyncio.open_connection("127.0.0.1", http.base_url.port)
            writer.write(ROUND_B)
            assert (await answer(reader))[0] == 200
            idle.append((reader, writer))
        assert await idle[0][0].read() == b""
        for _, writer in idle:
            writer.close()


async def test_a_pipelined_request_frees_its_slot_when_its_caller_leaves(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    behind = {
        "a request": request(http, "/v1/completions"),
        "half a head": b"POST /v1/completions HTTP/1.1\r\n",
        "half a body": request(http, "/v1/completions")[:-5],
        "more than is kept": b"x" * (256 << 10),
        "garbage": b"\0\0\0\0\r\n\r\n",
    }
    for sent in behind.values():
        for apart in (False, True):
            async with connected(http) as (_, writer):
                writer.write(request(http, "/v1/completions"))
                if apart:
                    sequence = await claimed(head)
                writer.write(sent)
                await writer.drain()
                if not apart:
                    sequence = await claimed(head)
            await until_figure(http, "shardline_http_in_flight", 0.0)
            assert head.beat(sequence), "the job whose caller left was not cancelled"
            head.end(sequence, JobState.CANCELLED)


async def test_pipelined_requests_are_answered_in_their_order(http: httpx.AsyncClient) -> None:
    async with connected(http) as (reader, writer):
        writer.write(
            ROUND_B * 50
            + b"GET /no HTTP/1.1\r\nHost: localhost\r\n\r\n"
            + request(http, "/v1/jobs") * 3
            + ROUND_B
        )
        statuses = [(await answer(reader))[0] for _ in range(55)]
    assert statuses == [200] * 50 + [401] + [202] * 3 + [200]


async def test_pipelined_requests_over_the_limit_end_the_connection_after_the_first(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    async with connected(http) as (reader, writer):
        writer.write(request(http, "/v1/completions"))
        sequence = await claimed(head)
        writer.write(request(http, "/v1/jobs", b" " * (64 << 10)))
        await until_figure(http, 'shardline_http_connections_closed_total{reason="pipelined"}', 1.0)
        head.say(sequence)
        head.finish(sequence)
        status, _ = await answer(reader)
        assert (status, await reader.read()) == (200, b"")


H2C = (
    "Connection: Upgrade, HTTP2-Settings",
    "Upgrade: h2c",
    "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk",
)


@pytest.mark.parametrize(
    "offer", [H2C, ("Connection: upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")]
)
async def test_an_offer_of_another_protocol_is_answered_in_http_1(
    http: httpx.AsyncClient, offer: tuple[str, ...]
) -> None:
    whole = request(http, "/v1/jobs", BODY, *offer)
    head_end = whole.index(b"\r\n\r\n") + 4
    for cuts in ((), (head_end,), (head_end - 1, head_end + 9), (20, head_end + 1)):
        async with connected(http) as (reader, writer):
            for start, end in zip((0, *cuts), (*cuts, len(whole)), strict=True):
                writer.write(whole[start:end])
                await writer.drain()
                await http.get("/health")
            assert (await answer(reader))[0] == 202
            writer.write(ROUND_B)
            assert (await answer(reader))[0] == 200


async def test_a_websocket_is_not_opened(http: httpx.AsyncClient) -> None:
    offer = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "a",
    }
    assert (await http.get("/v1/models", headers=offer)).status_code == 200


async def test_a_broken_body_ends_its_request_at_once(http: httpx.AsyncClient) -> None:
    async with connected(http) as (reader, writer):
        opening = request(http, "/v1/jobs", b"").replace(
            b"Content-Length: 0", b"Transfer-Encoding: chunked"
        )
        writer.write(opening + b"zz\r\n")
        assert (await answer(reader))[0] == 400
    await until_figure(http, "shardline_http_in_flight", 0.0)


async def test_a_connection_stays_for_the_time_between_requests(
    database_url: str, redis_url: str, head: TinyHead
) -> None:
    async with (
        running_gateway(database_url, redis_url, http_idle_timeout_s=1.0) as http,
        connected(http) as one,
    ):
        reader, writer = one
        writer.write(ROUND_B)
        assert (await answer(reader))[0] == 200
        assert await reader.read() == b""


async def test_a_stream_over_http_1_0_has_no_chunks(
    http: httpx.AsyncClient, head: TinyHead
) -> None:
    body = BODY[:-1] + b', "stream": true}'
    sent = request(http, "/v1/completions", body).replace(b"HTTP/1.1", b"HTTP/1.0")
    async with connected(http) as (reader, writer):
        with head.serving():
            writer.write(sent)
            opening, _, events = (await reader.read()).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in opening
    lines = [line for line in events.splitlines() if line]
    assert lines[-1] == b"data: [DONE]"
    assert all(line.startswith(b"data: ") for line in lines)
