"""Groups the jobs of concurrent requests into one transaction each. A slow COMMIT makes larger
groups, not a queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from services.gateway.client import GatewayClient
from shardline.base.aio import cancel_and_wait
from shardline.base.errors import ShardlineError, Unavailable
from shardline.store.connection.held_connection import HeldConnection
from shardline.store.inserts import EncodedRequest, StoredRequest
from shardline_server.metrics import GatewayMetrics

MAX_BATCH = 256
MAX_BATCH_BYTES = 8 << 20
"""Of requests in one transaction; a larger one travels alone."""

HELD_S = 1.0
"""Then the connection goes back to the pool, which pings it before its next use."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingInsert:
    """One request that waits until its row is committed."""

    model: str
    request: EncodedRequest
    is_named: bool
    """Its id or key is the caller's: it may be a repeat."""
    stored: asyncio.Future[StoredRequest] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class InsertBatcher:
    """Runs as one task. Admission bounds the number of waiting requests."""

    def __init__(self, client: GatewayClient, metrics: GatewayMetrics) -> None:
        self._client = client
        self._metrics = metrics
        self._waiting: deque[PendingInsert] = deque()
        self._has_work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task."""
        self._task = asyncio.create_task(self._run(), name="insert batcher")

    async def close(self) -> None:
        """Stop the task. No request waits any more when the server stops in order."""
        if self._task is not None:
            await cancel_and_wait(self._task)

    async def insert(
        self, model: str, request: EncodedRequest, *, is_named: bool = True
    ) -> StoredRequest:
        """The row of a request, once it is committed. Raises Invalid, Conflict, Unavailable."""
        waiting = PendingInsert(model=model, request=request, is_named=is_named)
        self._waiting.append(waiting)
        self._has_work.set()
        return await waiting.stored

    async def _run(self) -> None:
        while True:
            await self._has_work.wait()
            async with HeldConnection(self._client.database) as held:
                await self._store_for_a_while(held)

    async def _store_for_a_while(self, held: HeldConnection) -> None:
        """Store what comes within HELD_S."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + HELD_S
        while self._has_work.is_set() and loop.time() < until_s:
            self._has_work.clear()
            while self._waiting:
                await self._store(self._next_batch(), held)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until_s):
                    await self._has_work.wait()

    def _next_batch(self) -> list[PendingInsert]:
        batch = [self._waiting.popleft()]
        num_bytes = 0
        while self._waiting and len(batch) < MAX_BATCH:
            num_bytes += batch[-1].request.num_bytes
            if num_bytes + self._waiting[0].request.num_bytes > MAX_BATCH_BYTES:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _store(self, batch: Sequence[PendingInsert], held: HeldConnection) -> None:
        try:
            outcomes = await self._client.insert(
                [one.request for one in batch],
                may_repeat=any(one.is_named for one in batch),
                held=held,
            )
        except Unavailable as error:
            _fail(batch, error)
        except asyncio.CancelledError:
            _fail(batch, Unavailable("the gateway is stopping"))
            raise
        except Exception as error:  # noqa: BLE001 every waiting request must get the error
            if len(batch) == 1:
                _fail(batch, error)
                return
            # One request in the batch breaks a rule of the table: halve it, so that the others are
            # stored.
            half = len(batch) // 2
            await self._store(batch[:half], held)
            await self._store(batch[half:], held)
        else:
            self._metrics.insert_batch.observe(len(batch))
            for one, outcome in zip(batch, outcomes, strict=True):
                if isinstance(outcome, ShardlineError):
                    _fail([one], outcome)
                    continue
                num_new = 1 + len(outcome.others) if outcome.is_new else 0
                self._metrics.accepted.labels(one.model).inc(num_new)
                if not one.stored.done():
                    one.stored.set_result(outcome)


def _fail(batch: Sequence[PendingInsert], error: Exception) -> None:
    for one in batch:
        if not one.stored.done():
            one.stored.set_exception(error)
