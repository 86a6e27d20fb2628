"""Reads for many who ask at once: several answers in one query, one query at a time. Knows neither
rows nor callers.

However many ask, they take one connection of the pool and wait for their turn: they cannot use it
up for each other and for those who submit.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from shardline.base.aio import cancel_and_wait, is_cancelled
from shardline.client.database import AWAY, reachable
from shardline.store.connection.database import autocommitted

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
Waiting = tuple[Asked, asyncio.Future[Answer]]
"""One question, and where its answer goes."""


class QueryBatcher(Generic[Asked, Answer]):
    """One task, which begins with the first question. `query` gives the answers in the order of the
    questions, by one statement."""

    def __init__(
        self,
        database: AsyncEngine,
        query: Callable[[Connection, Sequence[Asked]], Sequence[Answer]],
        *,
        max_batch: int,
        name: str,
    ) -> None:
        self._database = autocommitted(database)
        self._query = query
        self._max_batch = max_batch
        self._name = name
        self._waiting: deque[Waiting[Asked, Answer]] = deque()
        self._bell = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """End the task."""
        if self._task is not None:
            await cancel_and_wait(self._task)

    async def read(self, asked: Asked) -> Answer:
        """Raises Unavailable, Invalid, and what the query raises."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=self._name)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, answer))
        self._bell.set()
        with reachable():
            return await answer

    async def _run(self) -> None:
        while not is_cancelled():
            await self._bell.wait()
            self._bell.clear()
            while self._waiting:
                batch = [
                    self._waiting.popleft() for _ in range(min(len(self._waiting), self._max_batch))
                ]
                if asking := [one for one in batch if not one[1].done()]:
                    await self._answer(asking)

    async def _answer(self, batch: Sequence[Waiting[Asked, Answer]]) -> None:
        try:
            async with self._database.connect() as connection:
                found = await connection.run_sync(self._query, [asked for asked, _ in batch])
        except (DBAPIError, *AWAY) as error:
            _fail(batch, error)
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        except Exception as error:  # noqa: BLE001 (a bad row fails its own caller alone)
            if len(batch) == 1:
                _fail(batch, error)
                return
            for one in batch:
                await self._answer([one])
        else:
            for (_, future), answer in zip(batch, found, strict=True):
                if not future.done():
                    future.set_result(answer)


def _fail(batch: Sequence[Waiting[Asked, Answer]], error: Exception) -> None:
    for _, future in batch:
        if not future.done():
            future.set_exception(error)
