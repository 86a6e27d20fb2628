"""Groups the jobs of concurrent requests into one transaction each. A slow COMMIT makes larger groups, not a queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardline.aio import cancel_and_wait
from shardline.client.gateway import GatewayClient
from shardline.errors import Unavailable
from shardline.job import JobRequest
from shardline.metrics import GatewayMetrics
from shardline.store.jobs import Stored
from shardline.tokenize import Prepared

MAX_BATCH = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingInsert:
    """One request that waits until its row is committed."""

    request: JobRequest
    prepared: Prepared
    stored: asyncio.Future[Stored] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


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

    async def insert(self, request: JobRequest, prepared: Prepared) -> Stored:
        """The row of a request, once it is committed. Raises Invalid, Conflict, Unavailable."""
        waiting = PendingInsert(request=request, prepared=prepared)
        self._waiting.append(waiting)
        self._has_work.set()
        return await waiting.stored

    async def _run(self) -> None:
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            while self._waiting:
                await self._store([self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_BATCH))])

    async def _store(self, batch: Sequence[PendingInsert]) -> None:
        try:
            rows = await self._client.insert(
                [one.request for one in batch],
                prepared=[(one.prepared.prompt_ids, one.prepared.max_tokens) for one in batch],
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
            # One request in the batch is invalid: halve it, so that the others are stored.
            half = len(batch) // 2
            await self._store(batch[:half])
            await self._store(batch[half:])
        else:
            self._metrics.insert_batch.observe(len(batch))
            for one, row in zip(batch, rows, strict=True):
                self._metrics.accepted.labels(one.request.model).inc(row.is_new)
                if not one.stored.done():
                    one.stored.set_result(row)


def _fail(batch: Sequence[PendingInsert], error: Exception) -> None:
    for one in batch:
        if not one.stored.done():
            one.stored.set_exception(error)
