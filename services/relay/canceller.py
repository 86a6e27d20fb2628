"""Turns Celery's revoke and terminate into cancels of rows. Knows no head.

A revoke that overtakes its task is kept in Postgres, and takes effect when that comes. Requests of
other doors have no such place: their ids are remembered here for a while.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from services.relay.celery.celery_request import job_id_of, task_key
from services.relay.celery.celery_results import CeleryResults
from services.relay.loop import Loop, LoopContext
from shardline.base.clock import monotonic_s
from shardline.store import jobs
from shardline_server.store import celery_tasks

MAX_REMEMBERED = 50_000
"""The number that Celery's workers remember."""
MAX_RETRIED = 10_000
"""With more than this many, none is looked for again."""
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
        self._pending: dict[str, PendingCancel] = {}

    def cancel(self, task_ids: Iterable[str], *, running: bool) -> int:
        """Cancel the jobs of tasks soon, and retry until their rows exist: a revoke may overtake
        the request that it is for. Returns how many ids were taken; the others found no room."""
        until_s = monotonic_s() + REMEMBER_TURNS * self._times.poll_s
        num_taken = 0
        with self._lock:
            for task_id in map(task_key, task_ids):
                earlier = self._pending.pop(task_id, None)
                if earlier is None and len(self._pending) >= MAX_REMEMBERED:
                    continue
                also_running = running or (earlier is not None and earlier.running)
                self._pending[task_id] = PendingCancel(running=also_running, until_s=until_s)
                num_taken += 1
        self.wake()
        return num_taken

    def turn(self) -> float:
        """Apply all pending cancels, MAX_BATCH per transaction."""
        with self._lock:
            pending = dict(self._pending)
        for running in (True, False):
            ids = [task_id for task_id, cancel in pending.items() if cancel.running is running]
            for first in range(0, len(ids), MAX_BATCH):
                batch = {task_id: pending[task_id] for task_id in ids[first : first + MAX_BATCH]}
                self._forget(batch, self._cancel(batch, running=running))
        return self._times.poll_s

    def _cancel(self, batch: Mapping[str, PendingCancel], *, running: bool) -> set[str]:
        """Returns those with existing jobs that are not locked: the others are tried again. Two
        transactions: a task's row must not be locked before its job's."""
        tasks = {task_id: job_id_of(task_id) for task_id in batch}
        with self._database.begin() as connection:
            tasks |= celery_tasks.revoke(connection, list(batch))
        with self._database.begin() as connection:
            found = jobs.request_cancel(
                connection, list(set(tasks.values())), running=running, waits=False
            )
            known = {task_id for task_id, job_id in tasks.items() if job_id in found}
            celery_tasks.forget_revokes(connection, known)
        self._results.note(found)
        return known

    def _forget(self, pending: Mapping[str, PendingCancel], found: Collection[str]) -> None:
        now_s = monotonic_s()
        with self._lock:
            is_full = len(self._pending) > MAX_RETRIED
            done = {
                *found,
                *(
                    task_id
                    for task_id, cancel in pending.items()
                    if is_full or cancel.until_s < now_s
                ),
            }
            for task_id in done:
                if self._pending.get(task_id) is pending[task_id]:
                    del self._pending[task_id]
