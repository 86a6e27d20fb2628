"""What a head's metrics and traces tell of the jobs that leave it. Knows no row and no pipeline.

A job's energy is that of its rows at the pipeline's present mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from services.stage.jobs.attempt_spans import AttemptSpans
from services.stage.jobs.live_job import LiveJob
from services.stage.jobs.outcome import JobOutcome
from services.stage.metrics import StageMeter


class JobTelemetry:
    """The JobObserver of a head."""

    def __init__(
        self,
        meter: StageMeter,
        spans: AttemptSpans,
        row_j: Callable[[], float],
    ) -> None:
        """`row_j` returns the mean joules of a row by now."""
        self._meter = meter
        self._spans = spans
        self._row_j = row_j

    def crashed(self, outcomes: Iterable[str]) -> None:
        """Counts jobs under which the pipeline broke."""
        self._meter.blamed(outcomes)

    def ended(self, outcome: JobOutcome) -> None:
        """Counts and traces a job's end."""
        self._meter.ended(outcome.state, outcome.job.latency())
        self._charge(outcome.job, outcome.num_rows)
        self._spans.ended(outcome)

    def given_back(self, job: LiveJob, outcome: str) -> None:
        """Counts and traces an attempt that ends without its job."""
        self._charge(job, job.num_rows())
        self._spans.given_back(job, outcome)

    def _charge(self, job: LiveJob, num_rows: int) -> None:
        self._meter.charge(job.claimed.tenant_id, num_rows * self._row_j())
