"""A head's spans in the traces of jobs, made when an attempt has left it: waits, claim, prefill,
decoding, COMMIT."""

from __future__ import annotations

from collections.abc import Iterator

from opentelemetry.trace import SpanKind

from services.stage.jobs.live_job import LiveJob
from services.stage.jobs.outcome import JobOutcome
from shardline.base.clock import monotonic_s
from shardline.contract.job import JobState
from shardline_scheduler.events import SequenceFailed
from shardline_server import genai
from shardline_server.store.claims import ClaimedJob
from shardline_server.tracing import (
    JobTrace,
    TracedPhase,
    Tracer,
    Value,
    attempt_span_id,
    traceparent,
)


class AttemptSpans:
    """Records the spans of one head. The lease manager's thread calls it, after COMMIT."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def traceparent(self, claimed: ClaimedJob) -> str:
        """Returns the attempt's, for the stages that compute it; empty where it is not traced."""
        if not self._tracer.is_on or not self._tracer.is_sampled(trace := _trace(claimed)):
            return ""
        return traceparent(trace, attempt_span_id(claimed.job_id, claimed.fence))

    def ended(self, outcome: JobOutcome) -> None:
        """The job's end is committed: its last attempt and the job itself."""
        if not self._tracer.is_on:
            return
        job = outcome.job
        event = outcome.event
        now_s = monotonic_s()
        trace = _trace(job.claimed)
        error = event.reason if isinstance(event, SequenceFailed) else None
        self._attempt(job, trace, str(outcome.state), error)
        accepted_s = job.began_s - job.claimed.age_s
        about = _about_job(outcome)
        name = f"{genai.TEXT_COMPLETION} {job.identity.model}"
        self._tracer.job(
            trace,
            TracedPhase(
                name=name, began_s=accepted_s, ended_s=now_s, attributes=about, error=error
            ),
        )

    def given_back(self, job: LiveJob, outcome: str) -> None:
        """The attempt's tokens are saved, and it goes on elsewhere."""
        if self._tracer.is_on:
            error = outcome if outcome in ("crashed", "failed") else None
            self._attempt(job, _trace(job.claimed), outcome, error)

    def _attempt(self, job: LiveJob, trace: JobTrace, outcome: str, error: str | None) -> None:
        claimed = job.claimed
        identity = job.identity
        span_id = attempt_span_id(claimed.job_id, claimed.fence)
        about: dict[str, Value] = {
            genai.JOB_ID: str(claimed.job_id),
            genai.FENCE: claimed.fence,
            genai.OUTCOME: outcome,
            genai.NUM_RESUMED: len(claimed.output_ids),
            genai.OUTPUT_TOKENS: len(job.ids) - len(claimed.output_ids),
            genai.WORKER: identity.worker,
            genai.PIPELINE: identity.pipeline,
            genai.EPOCH: identity.epoch,
        }
        queued = TracedPhase(
            name="queue", began_s=job.began_s - claimed.queued_s, ended_s=job.began_s, attributes={}
        )
        self._tracer.phase(trace, queued)
        began_s = min(job.delivery.began_s, job.began_s)
        ended_s = monotonic_s()
        attempt = TracedPhase(
            name="attempt",
            began_s=began_s,
            ended_s=ended_s,
            attributes=about,
            kind=SpanKind.CONSUMER,
            error=error,
        )
        self._tracer.phase(trace, attempt, span_id=span_id)
        for phase in _phases(job, began_s, ended_s):
            self._tracer.phase(trace, phase, parent_id=span_id)


def _phases(job: LiveJob, began_s: float, ended_s: float) -> Iterator[TracedPhase]:
    """One after the other, without a gap."""
    first_s = job.first_token_s or ended_s
    last_s = job.last_token_s or ended_s
    yield TracedPhase(name="claim", began_s=began_s, ended_s=job.began_s, attributes={})
    yield TracedPhase(name="prefill", began_s=job.began_s, ended_s=first_s, attributes={})
    if job.first_token_s is not None:
        yield TracedPhase(name="decode", began_s=first_s, ended_s=last_s, attributes={})
        yield TracedPhase(name="commit", began_s=last_s, ended_s=ended_s, attributes={})


def _about_job(outcome: JobOutcome) -> dict[str, Value]:
    job = outcome.job
    claimed = outcome.job.claimed
    params = outcome.job.claimed.params
    about: dict[str, Value] = {
        genai.OPERATION: genai.TEXT_COMPLETION,
        genai.PROVIDER: genai.SHARDLINE,
        genai.REQUEST_MODEL: job.identity.model,
        genai.REQUEST_MAX_TOKENS: claimed.max_tokens,
        genai.REQUEST_TEMPERATURE: params.temperature,
        genai.REQUEST_TOP_P: params.top_p,
        genai.REQUEST_TOP_K: params.top_k,
        genai.REQUEST_SEED: claimed.seed,
        genai.RESPONSE_ID: str(claimed.job_id),
        genai.INPUT_TOKENS: len(claimed.prompt_ids),
        genai.OUTPUT_TOKENS: len(job.ids),
        genai.JOB_ID: str(claimed.job_id),
        genai.JOB_STATE: str(outcome.state),
        genai.TENANT: claimed.tenant_id,
    }
    if outcome.state is not JobState.FAILED and not isinstance(outcome.event, SequenceFailed):
        about[genai.FINISH_REASONS] = (str(outcome.event.reason),)
        about[genai.CACHED_TOKENS] = outcome.event.num_cached
    return about


def _trace(claimed: ClaimedJob) -> JobTrace:
    return JobTrace.of(claimed.job_id, claimed.traceparent)
