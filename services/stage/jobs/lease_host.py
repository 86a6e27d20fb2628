"""What the job life cycle tells the head it belongs to. Knows no head."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from sqlalchemy import Connection

from services.stage.jobs.live_job import LiveJob
from services.stage.jobs.outcome import JobOutcome
from services.stage.jobs.result_publisher import ResultPublisher
from shardline_server.store.crashes import AttemptLimits


class JobObserver(Protocol):
    """Learns what becomes of jobs, in the lease manager's thread. No method may block."""

    def crashed(self, outcomes: Iterable[str]) -> None:
        """The pipeline broke under jobs that ran alone; what became of each."""

    def ended(self, outcome: JobOutcome) -> None:
        """A job's end was committed here."""

    def given_back(self, job: LiveJob, outcome: str) -> None:
        """A job goes on elsewhere, or here later: `released`, `crashed` or `failed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHost:
    """A head. Called in the lease manager's thread; none but `register_model` may block."""

    limits: AttemptLimits
    results: ResultPublisher | None
    """Takes the ends of jobs that are no Celery tasks; None without a result backend."""
    observer: JobObserver
    register_model: Callable[[Connection], None]
    """Stores the model's row again, with its adapters."""
    on_announced: Callable[[], None]
    """Postgres knows that the pipeline is ready: jobs may come."""
    on_superseded: Callable[[int, str], None]
    """Another head took the pipeline's name in this epoch; with the reason in words."""
