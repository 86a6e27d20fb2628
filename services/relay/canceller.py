"""Turns Celery's revoke and terminate into cancels of rows. Remembers ids without a row for a while; knows no head."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from uuid import UUID

from services.relay.celery_results import CeleryResults
from services.relay.loop import Loop, LoopContext
from shardline.clock import monotonic_s
from shardline.store import jobs

MAX_REMEMBERED = 10_000
MAX_BATCH = 128
REMEMBER_TURNS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCancel:
    """A cancel that was asked for; of a running job only if `running`."""

    running: bool
    until_s: float


class Canceller(Loop):
    """`cancel` is called on Celery's thread, which must not wait for Postgres."""

    def __init__(self, context: LoopContext, *, results: CeleryResults) -> None:
        super().__init__("canceller", context.metrics.errors)
        self._database = context.database
        self._results = results
        self._times = context.times
        self._lock = threading.Lock()
        self._pending: dict[UUID, PendingCancel] = {}

    def cancel(self, ids: Iterable[UUID], *, running: bool) -> None:
        """Cancel jobs soon, and retry until their rows exist: a revoke may overtake the request that it is for."""
        until_s = monotonic_s() + REMEMBER_TURNS * self._times.poll_s
        with self._lock:
            for job_id in ids:
                earlier = self._pending.pop(job_id, None)
                also_running = running or (earlier is not None and earlier.running)
                self._pending[job_id] = PendingCancel(running=also_running, until_s=until_s)
            while len(self._pending) > MAX_REMEMBERED:
                del self._pending[next(iter(self._pending))]
        self.wake()

    def turn(self) -> float:
        """Apply all pending cancels, MAX_BATCH per transaction."""
        with self._lock:
            pending = dict(self._pending)
        for running in (True, False):
            ids = [job_id for job_id, cancel in pending.items() if cancel.running is running]
            for first in range(0, len(ids), MAX_BATCH):
                batch = ids[first : first + MAX_BATCH]
                with self._database.begin() as connection:
                    found = jobs.request_cancel(connection, batch, running=running)
                self._results.note(found)
                self._forget({job_id: pending[job_id] for job_id in batch}, found)
        return self._times.poll_s

    def _forget(self, pending: dict[UUID, PendingCancel], found: Iterable[UUID]) -> None:
        now_s = monotonic_s()
        done = {*found, *(job_id for job_id, cancel in pending.items() if cancel.until_s < now_s)}
        with self._lock:
            for job_id in done:
                if self._pending.get(job_id) is pending[job_id]:
                    del self._pending[job_id]
