"""Reads the rows of followed jobs: those of many followers in one query, one query at a time. Knows no stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from shardline.client.database import AWAY
from shardline.job import SamplingParams
from shardline.store.progress import Asked, Progress, read_progress
from shardline.streams import Cursor, TextOf
from shardline.tasks import end_task

MAX_BATCH = 64
"""Jobs in one query."""

TextRule = Callable[[SamplingParams, int], TextOf]
"""For a job of these parameters and `max_tokens`: the text that a head gives out with its tokens."""


def learn(cursor: Cursor, progress: Progress, *, only_learn: bool = False) -> None:
    """One page for one reader."""
    cursor.catch_up(
        progress.start,
        progress.token_ids,
        fence=progress.fence,
        only_learn=only_learn,
        logprobs=progress.logprobs,
        text=progress.text,
        state=progress.state,
        finish_reason=progress.finish_reason,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Waiting:
    """One follower's question."""

    asked: Asked
    answer: asyncio.Future[Progress | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class ProgressReader:
    """One task; however many followers ask, they share one connection and wait for their turn."""

    def __init__(self, database: AsyncEngine) -> None:
        self._database = database
        self._waiting: deque[Waiting] = deque()
        self._bell = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to read."""
        self._task = asyncio.create_task(self._run(), name="progress")

    async def close(self) -> None:
        """End the task."""
        if self._task is not None:
            await end_task(self._task)

    async def read(self, asked: Asked) -> Progress | None:
        """None when there is no such job. Raises what the driver raises while Postgres is away."""
        waiting = Waiting(asked=asked)
        self._waiting.append(waiting)
        self._bell.set()
        return await waiting.answer

    async def _run(self) -> None:
        while True:
            await self._bell.wait()
            self._bell.clear()
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_BATCH))]
                if asking := [one for one in batch if not one.answer.done()]:
                    await self._answer(asking)

    async def _answer(self, batch: Sequence[Waiting]) -> None:
        try:
            async with self._database.connect() as connection:
                found = await connection.run_sync(read_progress, [one.asked for one in batch])
        except (DBAPIError, *AWAY) as error:
            _fail(batch, error)
        except asyncio.CancelledError:
            for one in batch:
                one.answer.cancel()
            raise
        except Exception as error:  # noqa: BLE001 a row that cannot be read must fail its own follower alone
            if len(batch) == 1:
                _fail(batch, error)
                return
            for one in batch:
                await self._answer([one])
        else:
            for one, progress in zip(batch, found, strict=True):
                if not one.answer.done():
                    one.answer.set_result(progress)


def _fail(batch: Sequence[Waiting], error: Exception) -> None:
    for one in batch:
        if not one.answer.done():
            one.answer.set_exception(error)
