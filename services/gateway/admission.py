"""Limits what this process handles at a time: requests in flight and bytes of bodies. Knows no
job."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import Request
from prometheus_client import Gauge

from services.gateway.errors import TooLarge, TooSlow
from shardline.base.errors import Invalid, Overload

RETRY_AFTER_S = 1.0

RESERVED_SHARE = 8
"""An eighth of the places is for other tenants than the one that has most."""

PACE_PER_S = 200.0
PACE_FREE_S = 0.1
PACE_MAX_S = 0.4
"""Answers without a key, how far ahead of that rate none waits (20 answers at once), and the
longest wait: a health check must not take it for a failure."""

DECODED_SHARE = 4
"""One body may take a fourth of what all may."""


class Gate:
    """Admits at most `limit` holders at a time, and of one tenant not all of them."""

    def __init__(self, limit: int, what: str, gauge: Gauge) -> None:
        self._limit = limit
        self.max_of_tenant = max(1, limit - limit // RESERVED_SHARE)
        self._what = what
        self._gauge = gauge
        self._num_inside = 0
        self._by_tenant: Counter[str] = Counter()

    @contextmanager
    def place(self, tenant: str, num: int = 1) -> Iterator[None]:
        """Admit `num` more holders of a tenant until the end of the block. Raises Overload."""
        if self._num_inside + num > self._limit:
            raise Overload(f"{self._limit} {self._what}, which is the limit", RETRY_AFTER_S)
        if self._by_tenant[tenant] + num > self.max_of_tenant:
            raise Overload(
                f"{self.max_of_tenant} {self._what} of this tenant, which is its limit",
                RETRY_AFTER_S,
            )
        self._count(tenant, num)
        try:
            yield
        finally:
            self._count(tenant, -num)

    def _count(self, tenant: str, change: int) -> None:
        self._num_inside += change
        self._by_tenant[tenant] += change
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
        self._gauge.set(self._num_inside)


class KeylessPace:
    """Spreads the answers to callers without a key once many come: a loop that asks without a pause
    for health checks must leave the process to the others. None waits while there are less than
    PACE_PER_S."""

    def __init__(self) -> None:
        self._due_s = 0.0

    async def wait(self) -> None:
        """Until the next answer is due, PACE_MAX_S at most."""
        now_s = asyncio.get_running_loop().time()
        self._due_s = min(max(self._due_s, now_s) + 1 / PACE_PER_S, now_s + PACE_MAX_S)
        if self._due_s - now_s > PACE_FREE_S:
            await asyncio.sleep(self._due_s - now_s)


class Admission:
    """Counts and never waits: a request over a limit learns when to retry."""

    def __init__(
        self,
        *,
        max_in_flight: int,
        max_followers: int,
        max_body_bytes: int,
        max_buffered_bytes: int,
        body_timeout_s: float,
        gauge: Gauge,
        followers_gauge: Gauge,
    ) -> None:
        self.pace = KeylessPace()
        self.requests = Gate(max_in_flight, "requests are in flight", gauge)
        self.followers = Gate(max_followers, "event streams are followed", followers_gauge)
        self._max_body_bytes = max_body_bytes
        self._max_buffered_bytes = max_buffered_bytes
        self._body_timeout_s = body_timeout_s
        self._num_buffered_bytes = 0

    @contextmanager
    def reading(self) -> Iterator[Room]:
        """Account for one body, from its first byte until its job is stored."""
        room = Room(self)
        try:
            yield room
        finally:
            self._num_buffered_bytes -= room.num_bytes

    def take_places(self, request: Request, tenant: str, num: int, *, field: str) -> None:
        """Count a request as `num`, which has one place, until its answer has been sent. Raises
        Overload, and Invalid, naming `field`, for one over the tenant's limit."""
        most = self.requests.max_of_tenant
        if num > most:
            problem = f"it stands for {num} jobs; this gateway answers {most} at a time"
            raise Invalid(field, problem, "Send fewer in a request")
        if num > 1:
            request.state.held.enter_context(self.requests.place(tenant, num - 1))

    def take(self, num_bytes: int) -> None:
        """Count bytes that have arrived: announced ones that never arrive block no request. Raises
        Overload."""
        if self._num_buffered_bytes + num_bytes > self._max_buffered_bytes:
            raise Overload("too many large requests are being read", RETRY_AFTER_S)
        self._num_buffered_bytes += num_bytes

    async def read(self, request: Request, room: Room) -> bytes:
        """Read the whole body. Raises TooLarge as soon as it is known to be over the limit, TooSlow
        when it does not arrive in time, and Overload when all buffers are full."""
        self._check(_announced_bytes(request))
        chunks: list[bytes] = []
        try:
            async with asyncio.timeout(self._body_timeout_s):
                async for chunk in request.stream():
                    self._check(room.num_bytes + len(chunk))
                    room.add(len(chunk))
                    chunks.append(chunk)
        except TimeoutError as error:
            raise TooSlow(
                "body", f"it did not arrive within {self._body_timeout_s:g} s", "Send it again"
            ) from error
        return b"".join(chunks)

    def check_decoded(self, num_bytes: int) -> None:
        """Raises TooLarge."""
        most_bytes = self._max_buffered_bytes // DECODED_SHARE
        if num_bytes > most_bytes:
            problem = (
                f"decoded it takes about {num_bytes >> 20} MiB; {most_bytes >> 20} MiB is the limit"
            )
            raise TooLarge("body", problem, "Send fewer values in a request")

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_body_bytes:
            raise TooLarge(
                "body",
                f"it is over {self._max_body_bytes} bytes",
                "Send shorter prompts or several requests",
            )


class Room:
    """The bytes of one body, and of what it becomes."""

    def __init__(self, admission: Admission) -> None:
        self.num_bytes = 0
        self._admission = admission

    def add(self, num_bytes: int) -> None:
        """Count more bytes of this body. Raises Overload."""
        self._admission.take(num_bytes)
        self.num_bytes += num_bytes

    def add_decoded(self, num_bytes: int) -> None:
        """Count what the body becomes once it is decoded. Raises TooLarge for one that takes more
        than its share of all buffers, whenever it comes, and Overload."""
        self._admission.check_decoded(num_bytes)
        self.add(num_bytes)


def _announced_bytes(request: Request) -> int:
    """The body's Content-Length; 0 when it is sent in chunks."""
    length = request.headers.get("content-length", "0")
    if not (length.isascii() and length.isdecimal()):
        raise Invalid(
            "content-length", f"{length[:32]!r} is not a number", "Send the body's size in bytes"
        )
    return int(length.lstrip("0")[:20] or "0")
