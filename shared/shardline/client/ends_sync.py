"""Learns that jobs have ended, for all waiting threads of one client, with one LISTEN and one
query. Knows no Redis.

There is no separate thread: one of those that wait does it for the others, and when it leaves the
next one does. While no thread waits, none listens: a listener that does not read would hold up
Postgres's queue of notifications.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from uuid import UUID

import psycopg
from sqlalchemy import URL

from shardline.base.errors import Unavailable
from shardline.contract.tables import DONE_CHANNEL
from shardline.store.connection.notify import Listener

RETRY_S = 0.2

PAUSE_S = 0.02
PAUSE_FACTOR = 3
"""Of the time that a look took: looking never takes more than a quarter of the time."""

Ended = Callable[[Sequence[UUID]], Iterable[UUID]]
"""Which of them have ended. Raises Unavailable."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EndWait:
    """What one thread waits for."""

    pending: set[UUID]


class SyncEnds:
    """Safe for any number of threads."""

    def __init__(self, ended: Ended, database_url: str | URL, *, poll_s: float) -> None:
        self._ended = ended
        self._listener = Listener(database_url, DONE_CHANNEL)
        self._poll_s = poll_s
        self._end_waits: list[EndWait] = []
        self._has_leader = False
        self._changed = threading.Condition()
        """Guards the waits and who leads; notified when a wait has become shorter or no thread
        leads."""

    @property
    def num_waiting(self) -> int:
        """Threads inside `wait`."""
        return len(self._end_waits)

    def wait(self, ids: Iterable[UUID], timeout_s: float | None) -> None:
        """Until all have ended. Raises TimeoutError."""
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        end_wait = EndWait(pending=set(ids))
        with self._changed:
            self._end_waits.append(end_wait)
        try:
            # What ended before the leader knew of this wait rings no more.
            self._look([end_wait])
            while end_wait.pending:
                if self._is_to_lead(end_wait, deadline_s):
                    self._lead(end_wait, deadline_s)
                if end_wait.pending and time.monotonic() >= deadline_s:
                    raise TimeoutError(
                        f"{len(end_wait.pending)} jobs have not ended within {timeout_s} s"
                    )
        finally:
            with self._changed:
                self._end_waits.remove(end_wait)
                if not self._end_waits:
                    self._listener.close()

    def _is_to_lead(self, end_wait: EndWait, deadline_s: float) -> bool:
        """Waits while another thread leads; False when that has found all, or when the time is
        over."""
        with self._changed:
            while (
                self._has_leader
                and end_wait.pending
                and (left_s := deadline_s - time.monotonic()) > 0
            ):
                self._changed.wait(None if left_s == math.inf else left_s)
            leads = not self._has_leader and bool(end_wait.pending)
            self._has_leader = self._has_leader or leads
            return leads

    def _lead(self, end_wait: EndWait, deadline_s: float) -> None:
        """Listen and look for all, until all its jobs have ended or its time is over."""
        try:
            while True:
                with self._changed:
                    end_waits = list(self._end_waits)
                took_s = self._look(end_waits)
                left_s = deadline_s - time.monotonic()
                if not end_wait.pending or left_s <= 0:
                    return
                self._listen(min(self._poll_s, left_s))
                time.sleep(
                    min(PAUSE_S + PAUSE_FACTOR * took_s, max(0.0, deadline_s - time.monotonic()))
                )
        finally:
            with self._changed:
                self._has_leader = False
                self._changed.notify_all()

    def _listen(self, timeout_s: float) -> None:
        """Until some job has ended; without Postgres a little while."""
        try:
            self._listener.wait(timeout_s)
        except (psycopg.Error, OSError):
            time.sleep(min(RETRY_S, timeout_s))

    def _look(self, end_waits: Sequence[EndWait]) -> float:
        """One look for all of these: how long it took. While Postgres is unreachable it finds
        nothing."""
        began_s = time.monotonic()
        with self._changed:
            pending = sorted({job_id for end_wait in end_waits for job_id in end_wait.pending})
        with suppress(Unavailable):
            ended = set(self._ended(pending))
            with self._changed:
                for end_wait in end_waits:
                    end_wait.pending.difference_update(ended)
                self._changed.notify_all()
        return time.monotonic() - began_s
