"""Turns of tenants at slow queries: one at a time for each, and few altogether. Knows no query."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from shardline.base.errors import Overload

MAX_WAITING = 32
"""Queries of one tenant that wait for their turn; more are refused for now."""

RETRY_AFTER_S = 2.0


class Queue:
    """The queries of one tenant."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.num_inside = 0


class TenantTurns:
    """A tenant that asks much waits for itself first, then with the others, each of which has one
    query there at most."""

    def __init__(
        self, max_at_once: int, what: str = "lists or costs", *, max_wait_s: float | None = None
    ) -> None:
        self._what = what
        self._max_wait_s = max_wait_s
        self._running = asyncio.Semaphore(max_at_once)
        self._queues: dict[str | None, Queue] = {}

    @asynccontextmanager
    async def take(self, tenant: str | None) -> AsyncIterator[None]:
        """Wait for the turn of a tenant's next query, and have it. Raises Overload for one that
        waits among too many, or for `max_wait_s`."""
        queue = self._queues.setdefault(tenant, Queue())
        if queue.num_inside > MAX_WAITING:
            raise Overload(
                f"{MAX_WAITING} {self._what} of this tenant wait, which is the limit",
                RETRY_AFTER_S,
            )
        queue.num_inside += 1
        try:
            async with AsyncExitStack() as turn:
                await self._enter(turn, queue)
                yield
        finally:
            queue.num_inside -= 1
            if queue.num_inside == 0:
                del self._queues[tenant]

    async def _enter(self, turn: AsyncExitStack, queue: Queue) -> None:
        try:
            async with asyncio.timeout(self._max_wait_s):
                await turn.enter_async_context(queue.turn)
                await turn.enter_async_context(self._running)
        except TimeoutError as error:
            problem = f"{self._what} of others took {self._max_wait_s:g} s, the longest wait"
            raise Overload(problem, RETRY_AFTER_S) from error
