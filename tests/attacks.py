"""What a caller may do to a gateway to the harm of the others, on loopback, bounded in number and
in time.

Each attack is a coroutine that goes on until it is cancelled. None needs a key but those that say
so.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import resource
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from typing import Any
from uuid import UUID

PIECE_BYTES = 64 << 10
MAX_BYTES = 4 << 30
"""Of the attacking process."""

MAX_ROUNDS = 2_000
"""Of one attacker: each ends by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A gateway, a key of it, and a job of that key that is large."""

    port: int
    key: str
    large_job: UUID


Attack = Callable[[Target], Coroutine[Any, Any, None]]


async def _each(num: int, one: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*(one() for _ in range(num)))


async def _again(one: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """One attacker after the other, on a new connection each time."""
    for _ in range(MAX_ROUNDS):
        with suppress(OSError, asyncio.IncompleteReadError):
            await one()


async def _pause(seconds: float) -> None:
    """Let the gateway be for so long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.Event().wait()


@contextmanager
def _closing(writer: asyncio.StreamWriter) -> Iterator[asyncio.StreamWriter]:
    try:
        yield writer
    finally:
        writer.transport.abort()


def _lines(*lines: str) -> bytes:
    return "\r\n".join([*lines, "", ""]).encode()


def _post(target: Target, route: str, body: bytes) -> bytes:
    head = (
        f"POST {route} HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer {target.key}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    return _lines(*head) + body


async def _endless(target: Target, opening: bytes, piece: bytes) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", target.port)
    with _closing(writer):
        writer.write(opening)
        while True:
            writer.write(piece)
            await writer.drain()


async def endless_heads(target: Target) -> None:
    """Heads of short lines without end."""
    await _each(
        4, lambda: _again(lambda: _endless(target, b"GET / HTTP/1.1\r\n", b"a: b\r\n" * 10_000))
    )


async def long_headers(target: Target) -> None:
    """One header without end."""
    await _each(
        4, lambda: _again(lambda: _endless(target, b"GET / HTTP/1.1\r\nA: ", b"x" * PIECE_BYTES))
    )


async def endless_trailers(target: Target) -> None:
    """Trailers without end behind a body."""
    opening = (
        _lines("POST /v1/jobs HTTP/1.1", "Host: localhost", "Transfer-Encoding: chunked") + b"0\r\n"
    )
    await _each(4, lambda: _again(lambda: _endless(target, opening, b"a: b\r\n" * 10_000)))


async def half_heads(target: Target) -> None:
    """More connections than there are files, each with half a head."""

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        with _closing(writer):
            writer.write(b"GET /health HTTP/1.1\r\n")
            await reader.read()
        await _pause(0.5)

    await _each(800, lambda: _again(one))


async def pipelined_delays(target: Target) -> None:
    """Completions that are due in an hour, each with a request behind it; the caller leaves. Needs
    a key."""
    body = json.dumps({"model": "clerk", "prompt": "sum: 1 + 2 =", "delay_s": 3600}).encode()
    whole = _post(target, "/v1/completions", body)

    async def one() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", target.port)
        with _closing(writer):
            writer.write(whole + whole)
            await writer.drain()
            await _pause(0.02)

    await _each(8, lambda: _again(one))


async def bombs(target: Target) -> None:
    """Bodies that grow to 25 times their size when they are decoded. Needs a key."""
    num = (7 << 20) // 3
    fields = (
        b'"prompt": "a", "metadata": {"a": [' + b"{}," * num + b"{}]}",
        b'"messages": [' + b"{}," * num + b"{}]",
        b'"messages": [' + b"{}," * (num // 6) + b"{}]",
    )

    async def one() -> None:
        for some in fields:
            reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
            with _closing(writer):
                writer.write(_post(target, "/v1/jobs", b'{"model": "clerk", ' + some + b"}"))
                await reader.readline()

    await _each(4, lambda: _again(one))


async def unread_answers(target: Target) -> None:
    """Large answers that are not read. Needs a key."""
    head = _lines(
        f"GET /v1/jobs/{target.large_job} HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer {target.key}",
    )

    async def one() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", target.port, limit=1024)
        with _closing(writer):
            writer.write(head)
            await _pause(60)

    await _each(60, lambda: _again(one))


async def slow_bodies(target: Target) -> None:
    """As many bodies as there may be requests, none of which comes. Needs a key."""

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        with _closing(writer):
            writer.write(_post(target, "/v1/jobs", b" " * 9)[:-8])
            await reader.readline()
            await _pause(0.2)

    await _each(300, lambda: _again(one))


async def _ask_without_a_pause(target: Target, path: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    with _closing(writer):
        while True:
            writer.write(_lines(f"GET {path} HTTP/1.1", "Host: localhost"))
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(
                int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            )


async def ready_flood(target: Target) -> None:
    """Whether the gateway is ready, asked by 300 without a pause."""
    await _each(300, lambda: _again(lambda: _ask_without_a_pause(target, "/ready")))


@contextmanager
def attacked(name: str, target: Target) -> Iterator[BaseProcess]:
    """The attack goes on in a process of its own, which has files, and not all memory."""
    context = multiprocessing.get_context("spawn")
    has_begun = context.Event()
    process = context.Process(target=_attack, args=(name, target, has_begun))
    process.start()
    try:
        assert has_begun.wait(60)
        yield process
    finally:
        process.kill()
        process.join()


def _attack(name: str, target: Target, has_begun: Event) -> None:
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    has_begun.set()
    asyncio.run(ATTACKS[name](target))


ATTACKS: dict[str, Attack] = {
    "endless heads": endless_heads,
    "long headers": long_headers,
    "endless trailers": endless_trailers,
    "half heads": half_heads,
    "pipelined delays": pipelined_delays,
    "bombs": bombs,
    "unread answers": unread_answers,
    "slow bodies": slow_bodies,
    "ready flood": ready_flood,
}
