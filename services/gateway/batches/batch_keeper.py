"""Goes on with batches that are due, one turn at a time: looks at their files, makes lines rows,
counts what has ended, ends them. Gateways share the work through Postgres."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import structlog

from services.gateway.batches.answer_rows import write_answers
from services.gateway.batches.ingestion import LinesWait, check_file, read_lines
from services.gateway.context import Gateway
from shardline.base.aio import cancel_and_wait, is_cancelled
from shardline.base.errors import ShardlineError, Unavailable
from shardline.contract.batches.batch import BatchStatus
from shardline.store import batch_lines, batches
from shardline.store.batches import BatchRow, TurnLost

log = structlog.get_logger(__name__)

IDLE_S = 1.0
"""Between two looks for a batch that is due, while there is none."""

FAILED_S = 2.0
"""Until a turn that failed is tried again."""

MIN_PAUSE_S = 0.25
MAX_PAUSE_S = 2.0
PAUSE_SHARE = 0.05
COUNTING_SHARE = 0.1
"""Between two counts of a batch's lines: a share of its age, and so long that counting takes a
tenth of the time."""


class BatchKeeper:
    """Runs as one task."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task."""
        self._task = asyncio.create_task(self._run(), name="batch keeper")

    async def close(self) -> None:
        """Stop the task. Another gateway, or the next one, goes on where it was."""
        if self._task is not None:
            await cancel_and_wait(self._task)

    async def _run(self) -> None:
        is_told = False
        while not is_cancelled():
            self._gateway.batches_due.clear()
            pause_s = IDLE_S
            try:
                if await self._turn():
                    pause_s = 0.0
                is_told = False
            except Unavailable as error:
                if not is_told:
                    log.warning("batches wait", error=str(error))
                is_told = True
            except asyncio.CancelledError:
                raise
            # Also a library's panic: no batch may end the work at the others.
            except BaseException as error:
                log.exception("a turn at a batch failed", error=str(error))
                pause_s = FAILED_S
            await self._sleep(pause_s)

    async def _sleep(self, pause_s: float) -> None:
        """Until a batch is made, or a while has passed."""
        try:
            async with asyncio.timeout(pause_s):
                await self._gateway.batches_due.wait()
        except TimeoutError:
            pass

    async def _turn(self) -> bool:
        """One turn at one batch. Returns whether there was one."""
        ask = self._gateway.client.ask
        batch = await ask(batches.take_batch)
        if batch is None:
            return False
        try:
            pause_s = await self._go_on(batch)
        except TurnLost:
            return True
        except ShardlineError:
            await ask(partial(batches.leave, batch=batch, pause_s=FAILED_S))
            raise
        if pause_s is not None:
            await ask(partial(batches.leave, batch=batch, pause_s=pause_s))
        return True

    async def _go_on(self, batch: BatchRow) -> float | None:
        """Returns the seconds until the batch is due again; None where it has ended."""
        ask = self._gateway.client.ask
        if batch.status is BatchStatus.VALIDATING:
            await check_file(self._gateway, batch)
            return 0.0
        if batch.moments["in_progress_at"] is not None and not batch.is_read:
            try:
                batch = await read_lines(self._gateway, batch)
            except LinesWait as wait:
                pause_s = await self._count(wait.batch)
                return None if pause_s is None else min(wait.retry_after_s, MAX_PAUSE_S)
        if batch.status is BatchStatus.CANCELLING and await ask(
            partial(batch_lines.cancel_lines, batch=batch)
        ):
            return 0.0
        return await self._count(batch)

    async def _count(self, batch: BatchRow) -> float | None:
        ask = self._gateway.client.ask
        began_s = time.monotonic()
        settled, counts, first_open = await ask(partial(batch_lines.count_lines, batch=batch))
        took_s = time.monotonic() - began_s
        if (settled, counts) != (batch.settled, batch.counts):
            write = partial(
                batches.write_counts,
                batch=batch,
                settled=settled,
                counts=counts,
                first_open=first_open,
            )
            await ask(write)
        if first_open <= batch.last_line:
            if not batch.is_read:
                return 0.0
            pause_s = min(max(MIN_PAUSE_S, PAUSE_SHARE * batch.age_s), MAX_PAUSE_S)
            return max(pause_s, took_s / COUNTING_SHARE)
        if batch.is_answered_in_rows and not await write_answers(self._gateway, batch):
            return 0.0
        status = BatchStatus.COMPLETED
        if batch.status is BatchStatus.CANCELLING:
            status = BatchStatus.CANCELLED
        elif counts.expired:
            status = BatchStatus.EXPIRED
        await ask(partial(batches.end_batch, batch=batch, status=status))
        log.info("a batch has ended", batch_id=str(batch.id), status=str(status))
        return None
