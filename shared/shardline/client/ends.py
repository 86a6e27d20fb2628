"""Learns that jobs have ended, for any number of waiters, with one LISTEN and one query. Knows no
Redis.

A NOTIFY carries no id; the poll finds what a lost one hid.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from uuid import UUID

import psycopg
import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from shardline.base.aio import cancel_and_wait, is_cancelled
from shardline.client.database import AWAY, MAX_IDS_PER_QUERY, told
from shardline.contract.tables import DONE_CHANNEL
from shardline.store import jobs
from shardline.store.connection.notify import rings
from shardline.streams import DeltaBuffer

log = structlog.get_logger(__name__)

RETRY_S = 0.5
PAUSE_S = 0.02
PAUSE_FACTOR = 3
"""Of the time that a look took: looking never takes more than a quarter of the time."""


class Ends:
    """Two tasks: one hears NOTIFYs and rings, one looks when it rings or when it is time."""

    def __init__(self, database: AsyncEngine, *, poll_s: float) -> None:
        self._database = database
        self._poll_s = poll_s
        self._watched: dict[UUID, list[DeltaBuffer]] = {}
        self._bell = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to listen and to look."""
        self._tasks = [
            asyncio.create_task(self._listen(), name="ends-listen"),
            asyncio.create_task(self._look(), name="ends-look"),
        ]

    async def close(self) -> None:
        """End both tasks."""
        for task in self._tasks:
            await cancel_and_wait(task)

    @contextmanager
    def watch(self, job_id: UUID, buffer: DeltaBuffer) -> Iterator[None]:
        """While inside, `buffer.end()` is called once the job has ended, also if that was long
        ago."""
        self._watched.setdefault(job_id, []).append(buffer)
        self._bell.set()
        try:
            yield
        finally:
            self._watched[job_id].remove(buffer)
            if not self._watched[job_id]:
                del self._watched[job_id]

    async def _listen(self) -> None:
        while not is_cancelled():
            try:
                async for _ in rings(self._database.url, DONE_CHANNEL):
                    self._bell.set()
            except (psycopg.Error, OSError) as error:
                log.warning(
                    "cannot listen to Postgres: ends are found by polling", error=str(error)[:200]
                )
            await asyncio.sleep(RETRY_S)

    async def _look(self) -> None:
        while not is_cancelled():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await self._bell.wait()
            self._bell.clear()
            began_s = time.monotonic()
            try:
                await self._find_ended()
            except (DBAPIError, *AWAY) as error:
                log.warning("ends of jobs cannot be looked for: waiting goes on", error=told(error))
                await asyncio.sleep(RETRY_S)
            await asyncio.sleep(PAUSE_S + PAUSE_FACTOR * (time.monotonic() - began_s))

    async def _find_ended(self) -> None:
        waiting = [
            job_id
            for job_id, buffers in self._watched.items()
            if not all(one.ended for one in buffers)
        ]
        if not waiting:
            return
        async with self._database.connect() as connection:
            for start in range(0, len(waiting), MAX_IDS_PER_QUERY):
                some = waiting[start : start + MAX_IDS_PER_QUERY]
                for job_id in await connection.run_sync(jobs.ended, some):
                    for buffer in self._watched.get(job_id, ()):
                        buffer.end()
