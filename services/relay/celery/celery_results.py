"""Stores ends of jobs without a head in Celery's result backend, so that `AsyncResult(id).get()`
returns.

Best effort, after COMMIT: the row is the truth. Does nothing without a result backend. Jobs that
are Celery tasks are not among them: `task_finisher` owns those, under the ids of their senders.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from uuid import UUID

import structlog
from celery import Celery

from services.relay.loop import POSTGRES_ERRORS, Loop, LoopContext
from shardline.contract.job import JobState
from shardline.store.connection.encoding import storable
from shardline_server.celery_results import store_end
from shardline_server.store import celery_tasks
from shardline_server.store.celery_tasks import CeleryTask

log = structlog.get_logger(__name__)

MAX_WAITING = 10_000


class CeleryResults(Loop):
    """`backend_app` is a Celery app with the result backend to store into; None without one."""

    def __init__(self, context: LoopContext, *, backend_app: Celery | None) -> None:
        super().__init__("results", context.metrics.errors)
        self._app = backend_app
        self._database = context.database
        self._times = context.times
        self._waiting: deque[tuple[UUID, JobState, str]] = deque(maxlen=MAX_WAITING)
        self._refused: deque[tuple[CeleryTask, Mapping[str, str]]] = deque(maxlen=MAX_WAITING)

    def note(self, outcomes: Mapping[UUID, str], reason: str = "") -> None:
        """Queue the results of ended jobs, from any thread; jobs in other states are skipped."""
        if self._app is None:
            return
        states = {
            job_id: JobState(outcome)
            for job_id, outcome in outcomes.items()
            if outcome in tuple(JobState)
        }
        self._waiting.extend(
            (job_id, state, reason) for job_id, state in states.items() if _is_ours(state)
        )
        self.wake()

    def note_refused(self, task: CeleryTask, reason: Mapping[str, str]) -> None:
        """Queue a message that is no request, from any thread: its sender hears why, under the id
        of the task."""
        if self._app is not None:
            self._refused.append((task, {name: storable(value) for name, value in reason.items()}))
            self.wake()

    def turn(self) -> float:
        """Store all queued results; one that the backend refuses is dropped, so that it holds up no
        other."""
        self._store_refused()
        batch = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if self._app is None or not batch:
            return self._times.poll_s
        others = self._tasks_among(batch)
        for job_id, state, reason in batch:
            if job_id not in others:
                self._store(self._app, job_id, state, reason)
        return self._times.poll_s

    def _store_refused(self) -> None:
        while self._refused:
            task, reason = self._refused[0]
            with self._database.begin() as connection:
                celery_tasks.store(connection, task, job_id=None, error=reason)
            self._refused.popleft()

    def _tasks_among(self, batch: Sequence[tuple[UUID, JobState, str]]) -> set[UUID]:
        """Those that are not ours. Without an answer of Postgres all of the batch waits again."""
        try:
            with self._database.begin() as connection:
                return celery_tasks.with_tasks(connection, [job_id for job_id, *_ in batch])
        except POSTGRES_ERRORS:
            self._waiting.extendleft(reversed(batch))
            raise

    def _store(self, app: Celery, job_id: UUID, state: JobState, reason: str) -> None:
        try:
            store_end(app, str(job_id), state, reason or "see the job's row")
        except Exception as error:  # noqa: BLE001 (whatever the backend's driver raises)
            self._errors.labels(server="none").inc()
            log.warning(
                "a result is not stored",
                job_id=str(job_id),
                error=f"{type(error).__name__}: {error}"[:200],
            )


def _is_ours(state: JobState) -> bool:
    """Heads store completions."""
    return state.terminal and state is not JobState.SUCCEEDED
