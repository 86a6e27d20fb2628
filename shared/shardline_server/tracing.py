"""Traces across services: which trace a job belongs to, and spans of what was done for it, made
when it is over.

Every process finds a job's trace in the job's row alone: it is the caller's, if a `traceparent`
came with the job, else the job's id is the trace's id. Off, and free, unless OpenTelemetry's own
variables name an OTLP endpoint. Needs the extra `observe`. Knows no service: who has a phase names
it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Self
from uuid import UUID

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    format_span_id,
    format_trace_id,
    get_current_span,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shardline.base.clock import monotonic_s, wall_clock_s
from shardline.base.trace_context import MAX_TRACEPARENT_CHARS

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
HEADER = "traceparent"
CLOSE_S = 2.0
"""For what waits at the end: a collector that hangs holds no stop up."""

Value = str | int | float | bool | Sequence[str]

_PROPAGATOR = TraceContextTextMapPropagator()
_SCOPE = InstrumentationScope("shardline")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTrace:
    """Tells where a job's spans belong. `span_id` is that of the job's own span, which its end
    makes."""

    trace_id: int
    span_id: int
    parent_id: int | None
    """The caller's span; None: the job begins the trace."""
    is_sampled: bool

    @classmethod
    def of(cls, job_id: UUID, traceparent: str | None) -> Self:
        """Makes it from the job's row; what is no traceparent counts as none."""
        caller = _caller(traceparent)
        if caller is None:
            return cls(
                trace_id=job_id.int,
                span_id=_span_id(job_id, "job"),
                parent_id=None,
                is_sampled=True,
            )
        return cls(
            trace_id=caller.trace_id,
            span_id=_span_id(job_id, "job"),
            parent_id=caller.span_id,
            is_sampled=caller.trace_flags.sampled,
        )

    @property
    def trace(self) -> str:
        """The trace's id, as logs and collectors show it."""
        return format_trace_id(self.trace_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedPhase:
    """What was done for a job, and when by `monotonic_s` of this host."""

    name: str
    began_s: float
    ended_s: float
    attributes: Mapping[str, Value]
    kind: SpanKind = SpanKind.INTERNAL
    error: str | None = None


def attempt_span_id(job_id: UUID, fence: int) -> int:
    """Returns the id of the span of one attempt at a job: known before the attempt has ended."""
    return _span_id(job_id, f"attempt {fence}")


class Tracer:
    """One of each process. `processor` is where spans go; None: nowhere. Safe from any thread;
    nothing waits."""

    def __init__(self, service: str, processor: SpanProcessor | None) -> None:
        self._processor = processor
        self._ids = RandomIdGenerator()
        if processor is not None:
            self._resource = Resource.create({"service.name": f"shardline-{service}"})
            # Only for the sampler that OTEL_TRACES_SAMPLER names.
            self._sampler = TracerProvider(shutdown_on_exit=False).sampler

    @classmethod
    def from_environment(cls, service: str) -> Tracer:
        """Sends to the OTLP endpoint that the environment names, in batches; or is off. While the
        collector is away its queue keeps OTEL_BSP_MAX_QUEUE_SIZE spans, 2,048 by default, and loses
        the oldest."""
        is_off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
        if (
            is_off
            or os.environ.get("OTEL_TRACES_EXPORTER") == "none"
            or not any(map(os.environ.get, ENDPOINTS))
        ):
            return cls(service, None)
        return cls(service, BatchSpanProcessor(OTLPSpanExporter()))

    @property
    def is_on(self) -> bool:
        """Whether any span goes anywhere."""
        return self._processor is not None

    def is_sampled(self, trace: JobTrace) -> bool:
        """Decides as the caller did; without one the sampler does, for all processes alike, since
        it goes by the id."""
        if self._processor is None or not trace.is_sampled:
            return False
        if trace.parent_id is not None:
            return True
        return (
            self._sampler.should_sample(None, trace.trace_id, "job").decision
            is Decision.RECORD_AND_SAMPLE
        )

    def job(self, trace: JobTrace, phase: TracedPhase) -> None:
        """The job's own span, the parent of all others: at its end."""
        self._send(trace, phase, trace.span_id, trace.parent_id)

    def phase(
        self,
        trace: JobTrace,
        phase: TracedPhase,
        *,
        span_id: int | None = None,
        parent_id: int | None = None,
    ) -> None:
        """A phase of the job, or of the span `parent_id` of it."""
        self._send(
            trace, phase, span_id or self._ids.generate_span_id(), parent_id or trace.span_id
        )

    def close(self) -> None:
        """Send what waits, for at most CLOSE_S."""
        if self._processor is not None:
            closing = threading.Thread(
                target=self._processor.shutdown, name="tracer-close", daemon=True
            )
            closing.start()
            closing.join(CLOSE_S)

    def _send(
        self, trace: JobTrace, phase: TracedPhase, span_id: int, parent_id: int | None
    ) -> None:
        if self._processor is None or not self.is_sampled(trace):
            return
        to_wall_s = wall_clock_s() - monotonic_s()
        self._processor.on_end(
            ReadableSpan(
                name=phase.name,
                context=_context(trace.trace_id, span_id),
                parent=None if parent_id is None else _context(trace.trace_id, parent_id),
                resource=self._resource,
                attributes={
                    name: value for name, value in phase.attributes.items() if value is not None
                },
                kind=phase.kind,
                status=Status(StatusCode.UNSET)
                if phase.error is None
                else Status(StatusCode.ERROR, phase.error),
                start_time=_nanoseconds(phase.began_s + to_wall_s),
                end_time=_nanoseconds(max(phase.began_s, phase.ended_s) + to_wall_s),
                instrumentation_scope=_SCOPE,
            )
        )


OFF = Tracer("off", None)


def traceparent(trace: JobTrace, span_id: int) -> str:
    """Names a span of a job's trace to another process."""
    return f"00-{format_trace_id(trace.trace_id)}-{format_span_id(span_id)}-01"


def parse_traceparent(text: str) -> JobTrace | None:
    """What `traceparent` made, as a trace with its spans below that span; None: it is none."""
    caller = _caller(text)
    if caller is None:
        return None
    return JobTrace(
        trace_id=caller.trace_id, span_id=caller.span_id, parent_id=caller.span_id, is_sampled=True
    )


def _caller(text: str | None) -> SpanContext | None:
    if not text or len(text) > MAX_TRACEPARENT_CHARS:
        return None
    found = get_current_span(_PROPAGATOR.extract({HEADER: text}, Context())).get_span_context()
    return found if found.is_valid else None


def _span_id(job_id: UUID, what: str) -> int:
    """The same in every process; zero, which is no id, has no chance worth a line."""
    return int.from_bytes(blake2b(what.encode(), key=job_id.bytes, digest_size=8).digest())


def _context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(
        trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)
    )


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
