"""Learns that jobs have ended, for all tasks or threads that wait, with one LISTEN and one query.

A NOTIFY carries no id; the poll finds what a lost one hid. Knows no Redis.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from uuid import UUID

import psycopg
import structlog
from sqlalchemy import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from shardline.base.aio import cancel_and_wait, is_cancelled
from shardline.base.errors import Unavailable
from shardline.client import questions
from shardline.client.database import AWAY, outage_of
from shardline.contract.tables import DONE_CHANNEL
from shardline.store.connection.notify import Listener, rings
from shardline.streams import DeltaBuffer

log = structlog.get_logger(__name__)

RETRY_S = 0.5
THREAD_RETRY_S = 0.2
PAUSE_S = 0.02
PAUSE_FACTOR = 3
"""Of the time that a look took: looking never takes more than a quarter of the time."""

Ended = Callable[[Sequence[UUID]], Iterable[UUID]]
"""Which of them have ended, or were deleted. Raises Unavailable."""


class Ends:
    """Two tasks, from the first watched job on: one hears NOTIFYs and rings, one looks when it
    rings or when it is time."""

    def __init__(self, database: AsyncEngine, *, poll_s: float) -> None:
        self._database = database
        self._poll_s = poll_s
        self._watched: dict[UUID, list[DeltaBuffer]] = {}
        self._bell = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def close(self) -> None:
        """End both tasks."""
        for task in self._tasks:
            await cancel_and_wait(task)

    @contextmanager
    def watch(self, job_id: UUID, buffer: DeltaBuffer) -> Iterator[None]:
        """While inside, `buffer.end()` is called once the job has ended, also if that was long
        ago, or has no row any more."""
        if not self._tasks:
            listening = asyncio.create_task(self._listen(), name="ends-listen")
            self._tasks = [listening, asyncio.create_task(self._look(), name="ends-look")]
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
                outage = outage_of(error)
                log.warning("ends of jobs cannot be looked for: waiting goes on", error=outage)
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
            ended = await connection.run_sync(questions.ended(waiting))
        for job_id in ended:
            for buffer in self._watched.get(job_id, ()):
                buffer.end()


class SyncEnds:
    """Safe for any number of threads. One of those that wait listens and looks for the others; when
    it leaves, the next one does.

    While no thread waits, none listens: a listener that does not read would hold up Postgres's
    queue of notifications.
    """

    def __init__(self, ended: Ended, database_url: str | URL, *, poll_s: float) -> None:
        self._ended = ended
        self._listener = Listener(database_url, DONE_CHANNEL)
        self._poll_s = poll_s
        self._waits: dict[int, set[UUID]] = {}
        """What each thread still waits for, by the set's identity."""
        self._has_leader = False
        self._changed = threading.Condition()
        """Guards the waits and who leads; notified when a wait has become shorter or no thread
        leads."""

    def wait(self, ids: Iterable[UUID], timeout_s: float | None) -> None:
        """Until all have ended or were deleted. Raises TimeoutError."""
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        pending = set(ids)
        with self._changed:
            self._waits[id(pending)] = pending
        try:
            # What ended before the leader knew of this wait rings no more.
            self._look([pending])
            while pending:
                if self._is_to_lead(pending, deadline_s):
                    self._lead(pending, deadline_s)
                if pending and time.monotonic() >= deadline_s:
                    raise TimeoutError(f"{len(pending)} jobs have not ended within {timeout_s} s")
        finally:
            with self._changed:
                del self._waits[id(pending)]
                if not self._waits:
                    self._listener.close()

    def _is_to_lead(self, pending: set[UUID], deadline_s: float) -> bool:
        """Waits while another thread leads; False when that found all, or when the time is over."""
        with self._changed:
            while self._has_leader and pending and (left_s := deadline_s - time.monotonic()) > 0:
                self._changed.wait(None if left_s == math.inf else left_s)
            leads = not self._has_leader and bool(pending)
            self._has_leader = self._has_leader or leads
            return leads

    def _lead(self, pending: set[UUID], deadline_s: float) -> None:
        """Listen and look for all, until all its jobs have ended or its time is over."""
        try:
            while True:
                with self._changed:
                    waits = list(self._waits.values())
                took_s = self._look(waits)
                left_s = deadline_s - time.monotonic()
                if not pending or left_s <= 0:
                    return
                self._listen(min(self._poll_s, left_s))
                left_s = max(0.0, deadline_s - time.monotonic())
                time.sleep(min(PAUSE_S + PAUSE_FACTOR * took_s, left_s))
        finally:
            with self._changed:
                self._has_leader = False
                self._changed.notify_all()

    def _listen(self, timeout_s: float) -> None:
        """Until some job has ended; without Postgres a little while."""
        try:
            self._listener.wait(timeout_s)
        except (psycopg.Error, OSError):
            time.sleep(min(THREAD_RETRY_S, timeout_s))

    def _look(self, waits: Sequence[set[UUID]]) -> float:
        """Looks for all of these, and returns how long that took. Finds none without Postgres."""
        began_s = time.monotonic()
        with self._changed:
            asked = sorted(set().union(*waits))
        with suppress(Unavailable):
            ended = set(self._ended(asked))
            with self._changed:
                for pending in waits:
                    pending.difference_update(ended)
                self._changed.notify_all()
        return time.monotonic() - began_s
