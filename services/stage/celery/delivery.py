"""One delivery of a job by Celery, and the verdict that other threads give on it. Knows no
Postgres."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from billiard.einfo import ExceptionInfo
from celery.exceptions import Ignore, Terminated

from services.stage.celery.hub_calls import HubCalls
from shardline.base.clock import monotonic_s
from shardline.base.errors import JobFailed
from shardline.contract.job import DEFAULT_PRIORITY

SIGTERM = 15


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Delivery:
    """Celery's side of one delivery. The verdict methods may be called from any thread; each acts
    in Celery's thread.

    The first final verdict counts, a later one does nothing. Celery keeps only a weak reference to
    a delivery.
    """

    number: int
    job_id: str
    priority: int = DEFAULT_PRIORITY
    hub: HubCalls
    on_accepted: Callable[[int, float], None]
    on_ended: Callable[[tuple[int, Any, float]], None]
    forget: Callable[[int], bool]
    """Frees the seat; False when it was free already."""
    began_s: float = field(default_factory=monotonic_s)
    locked_since_s: float | None = None
    """The lease manager's: when it found the row locked by another transaction."""

    def accept(self) -> None:
        """The row was claimed: Celery reports STARTED."""
        now_s = monotonic_s()
        self.hub.post(lambda: self.on_accepted(self.number, now_s))

    def succeed(self, value: dict[str, Any]) -> None:
        """The result row is committed."""
        self._end(0, value)

    def drop(self) -> None:
        """Nothing to do here: no such claim, or the claim was lost or given back. Acknowledged in
        silence."""
        self._end(1, _exception_info(Ignore()))

    def revoke(self) -> None:
        """The row ended `cancelled` or `expired`."""
        self._end(1, _exception_info(Terminated(SIGTERM)))

    def fail(self, reason: str) -> None:
        """The row ended `failed`."""
        self._end(1, _exception_info(JobFailed(reason)))

    def terminate(self, signal: int | None = None) -> None:
        """Called by Celery itself; does nothing: a stop goes through the row (see
        `remote_control`)."""

    def _end(self, failed: int, value: Any) -> None:
        self.hub.post(lambda: self._settle((failed, value, monotonic_s() - self.began_s)))

    def _settle(self, outcome: tuple[int, Any, float]) -> None:
        if self.forget(self.number):
            self.on_ended(outcome)


def _exception_info(error: Exception) -> ExceptionInfo:
    try:
        raise error
    except type(error):
        return ExceptionInfo()
