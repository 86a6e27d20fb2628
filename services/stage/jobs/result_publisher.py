"""The head's one thread that waits for Celery's result backend. Nothing waits for it, streams and
jobs least of all.

A result that it cannot store is in Postgres. Jobs that are Celery tasks are not among its own:
relays tell those.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import structlog

from shardline.contract.job import JobState

log = structlog.get_logger(__name__)

MAX_WAITING = 1_000
"""Results, with their texts. While the backend hangs the oldest are dropped."""

StoreResult = Callable[[str, JobState, Any], None]
"""Called with (job id, state, value): stores how a job ended. May raise anything that the
backend's driver does."""


class ResultPublisher(threading.Thread):
    """A result that fails is dropped, so that it holds up no other."""

    def __init__(self, store: StoreResult) -> None:
        super().__init__(name="results", daemon=True)
        self._store = store
        self._waiting: deque[tuple[str, JobState, Any]] = deque(maxlen=MAX_WAITING)
        self._woken = threading.Event()
        self._running = True

    def put(self, job_id: str, state: JobState, value: Any) -> None:
        """Takes a result from the lease manager's thread, after COMMIT. `value` is the completion
        or the reason of a failure."""
        self._waiting.append((job_id, state, value))
        self._woken.set()

    def stop(self) -> None:
        """End the thread after what waits is stored, or given up."""
        self._running = False
        self._woken.set()

    def run(self) -> None:
        """Publishes until stopped."""
        while self._running or self._waiting:
            self._woken.wait(1.0)
            self._woken.clear()
            while self._waiting:
                self._try(*self._waiting.popleft())

    def _try(self, job_id: str, state: JobState, value: Any) -> None:
        try:
            self._store(job_id, state, value)
        except Exception as error:  # noqa: BLE001 (whatever the backend's driver raises)
            log.warning(
                "a result is not stored",
                job_id=job_id,
                error=f"{type(error).__name__}: {error}"[:200],
            )
