"""What the job life cycle tells the head it belongs to. Owns the Protocol; knows no head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from services.stage.jobs.live_job import LiveJob
from services.stage.jobs.outcome import JobOutcome
from shardline.contract.job import JobState


class LeaseHost(Protocol):
    """Called in the lease manager's thread. No method may block."""

    @property
    def max_crashes(self) -> int:
        """So often at most may engines die under any job before it ends."""

    @property
    def tells_results(self) -> bool:
        """Whether `job_told` does anything."""

    def readiness_announced(self) -> None:
        """Postgres knows that the pipeline is ready: jobs may come."""

    def epoch_superseded(self, epoch: int) -> None:
        """Another head took the pipeline's name."""

    def jobs_crashed(self, outcomes: Iterable[str]) -> None:
        """The pipeline broke under jobs that ran alone; what became of each."""

    def job_told(self, job_id: str, state: JobState, value: Any) -> None:
        """The end of a job that is no Celery task is committed: its completion, or the reason of a
        failure."""

    def job_ended(self, outcome: JobOutcome) -> None:
        """A job's end was committed here."""

    def attempt_given_back(self, job: LiveJob, outcome: str) -> None:
        """A job goes on elsewhere, or here later: `released` or `crashed`."""
