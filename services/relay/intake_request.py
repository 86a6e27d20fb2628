"""How a relay's Celery worker takes a request: at once, whatever time it is for and its arguments
are named. Knows no row."""

from __future__ import annotations

from typing import Any

from celery import Task
from celery.worker.request import Request


class IntakeRequest(Request):
    """A message of the Celery door, which goes on at once: its row waits, expires and is cancelled.

    Celery would keep a task with `eta` in the worker's memory, where a revoke may pass it by, and
    drop one that is revoked or expired without a word to its sender.
    """

    @property
    def eta(self) -> None:
        """The row waits, not the worker: see `celery_request`."""
        return

    @property
    def expires(self) -> None:
        """The row expires."""
        return

    @expires.setter
    def expires(self, value: Any) -> None:
        """Celery's own code sets it."""

    def revoked(self) -> bool:
        """The row is cancelled."""
        return False


class IntakeTask(Task):
    """A task with keyword arguments of any name: Celery's own call takes one named `self` as its
    own."""

    Request = IntakeRequest

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Called by Celery's tracer."""
        return self.run(*args, **kwargs)
