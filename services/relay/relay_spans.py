"""A relay's spans in the traces of jobs: intake, preparation, messages, sweeps, and the ends that
relays give.

Rows are asked for what a trace needs only where one is wanted: without an OTLP endpoint nothing
here costs anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from uuid import UUID

from opentelemetry.trace import SpanKind
from sqlalchemy import Engine

from shardline.base.clock import monotonic_s
from shardline.contract.job import JobRequest, JobState
from shardline_server import genai
from shardline_server.store.outbox import Send
from shardline_server.store.traced import TracedJob, traced
from shardline_server.tracing import JobTrace, TracedPhase, Tracer, Value, attempt_span_id


class RelaySpans:
    """Makes the spans of one relay. Each method is called after COMMIT, with moments of
    `monotonic_s`."""

    def __init__(self, database: Engine, tracer: Tracer) -> None:
        self._database = database
        self._tracer = tracer

    def accepted(self, requests: Iterable[JobRequest], began_s: float) -> None:
        """Requests by Celery or Redis are rows now."""
        if not self._tracer.is_on:
            return
        for request in requests:
            if request.id is not None:
                about = {genai.JOB_ID: str(request.id), genai.REQUEST_MODEL: request.model}
                phase = TracedPhase(
                    name="accept",
                    began_s=began_s,
                    ended_s=monotonic_s(),
                    attributes=about,
                    kind=SpanKind.SERVER,
                )
                self._tracer.phase(JobTrace.of(request.id, request.traceparent), phase)

    def prepared(self, ids: Collection[UUID], began_s: float) -> None:
        """Rows were tokenized; those that could not be have ended."""
        for job, trace in self._traced(ids):
            self._tracer.phase(trace, _phase("prepare", job, began_s, monotonic_s()))
            self._end(job, trace)

    def published(self, send: Send, began_s: float) -> None:
        """A message to heads has left."""
        if not self._tracer.is_on:
            return
        phase = TracedPhase(
            name="publish",
            began_s=began_s,
            ended_s=monotonic_s(),
            attributes={
                genai.JOB_ID: str(send.job_id),
                genai.REQUEST_MODEL: send.model,
                genai.NUM_SENDS: send.num_sends,
            },
            kind=SpanKind.PRODUCER,
        )
        self._tracer.phase(JobTrace.of(send.job_id, send.traceparent), phase)

    def ended(self, ids: Collection[UUID]) -> None:
        """Jobs that waited were cancelled or expired."""
        for job, trace in self._traced(ids):
            self._end(job, trace)

    def rescued(self, moved: Mapping[UUID, str]) -> None:
        """Heads are gone that held these jobs: only the relay can report the attempts."""
        for job, trace in self._traced(moved):
            if job.fence is not None and job.attempt_s is not None:
                now_s = monotonic_s()
                outcome = str(moved[job.job_id])
                about: dict[str, Value] = {
                    genai.OUTCOME: outcome,
                    genai.FENCE: job.fence,
                    genai.WORKER: job.worker or "",
                }
                attempt = _phase(
                    "attempt", job, now_s - job.attempt_s, now_s, about=about, error=outcome
                )
                self._tracer.phase(trace, attempt, span_id=attempt_span_id(job.job_id, job.fence))
            self._end(job, trace)

    def _traced(self, ids: Collection[UUID]) -> list[tuple[TracedJob, JobTrace]]:
        if not self._tracer.is_on or not ids:
            return []
        with self._database.begin() as connection:
            found = traced(connection, ids)
        return [(job, JobTrace.of(job.job_id, job.traceparent)) for job in found]

    def _end(self, job: TracedJob, trace: JobTrace) -> None:
        """The job's own span, if its end came from here: a head makes that of jobs that it ends."""
        if not job.state.terminal:
            return
        now_s = monotonic_s()
        about = {
            genai.OPERATION: genai.TEXT_COMPLETION,
            genai.PROVIDER: genai.SHARDLINE,
            genai.RESPONSE_ID: str(job.job_id),
            genai.JOB_STATE: str(job.state),
            genai.TENANT: job.tenant,
        }
        error = job.problem or str(job.state) if job.state is JobState.FAILED else None
        name = f"{genai.TEXT_COMPLETION} {job.model}"
        self._tracer.job(
            trace, _phase(name, job, now_s - job.age_s, now_s, about=about, error=error)
        )


def _phase(
    name: str,
    job: TracedJob,
    began_s: float,
    ended_s: float,
    *,
    about: Mapping[str, Value] | None = None,
    error: str | None = None,
) -> TracedPhase:
    attributes = {genai.JOB_ID: str(job.job_id), genai.REQUEST_MODEL: job.model, **(about or {})}
    return TracedPhase(
        name=name, began_s=began_s, ended_s=ended_s, attributes=attributes, error=error
    )
