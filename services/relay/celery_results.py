"""Stores ends of jobs without a head in Celery's result backend, so that `AsyncResult(id).get()` returns.

Best effort, after COMMIT: the row is the truth. Does nothing without a result backend.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from uuid import UUID

from celery import Celery
from celery.exceptions import TaskRevokedError

from services.relay.loop import Loop, LoopContext
from shardline.errors import JobFailed
from shardline.job import JobState

MAX_WAITING = 10_000


class CeleryResults(Loop):
    """`backend_app` is a Celery app whose result backend is stored into; None without one."""

    def __init__(self, context: LoopContext, *, backend_app: Celery | None) -> None:
        super().__init__("results", context.metrics.errors)
        self._app = backend_app
        self._times = context.times
        self._waiting: deque[tuple[str, JobState, str]] = deque(maxlen=MAX_WAITING)

    def note(self, outcomes: Mapping[UUID, str], reason: str = "") -> None:
        """Queue the results of ended jobs, from any thread; jobs in other states are skipped."""
        if self._app is None:
            return
        states = {job_id: JobState(outcome) for job_id, outcome in outcomes.items() if outcome in tuple(JobState)}
        self._waiting.extend((str(job_id), state, reason) for job_id, state in states.items() if state.terminal)
        self.wake()

    def turn(self) -> float:
        """Store all queued results; one that fails is retried."""
        while self._app is not None and self._waiting:
            job_id, state, reason = self._waiting[0]
            if state is JobState.FAILED:
                self._app.backend.store_result(job_id, JobFailed(reason or "see the job's row"), "FAILURE")
            elif state in (JobState.CANCELLED, JobState.EXPIRED):
                self._app.backend.store_result(job_id, TaskRevokedError(state), "REVOKED")
            self._waiting.popleft()
        return self._times.poll_s
