"""Traces across services: spans of what they do for a job, joined by the `traceparent` in its row.

Off, and free, unless OTEL_EXPORTER_OTLP_ENDPOINT is set; then OpenTelemetry's own OTEL_* settings apply. Needs the
extra `observe`. Knows no service: who has a phase names it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
HEADER = "traceparent"
Value = str | int | float | bool


class Tracer:
    """One of each process. `processor` is where spans go; None: nowhere."""

    def __init__(self, service: str, processor: SpanProcessor | None) -> None:
        self._provider: TracerProvider | None = None
        self._propagator = TraceContextTextMapPropagator()
        if processor is not None:
            self._provider = TracerProvider(resource=Resource.create({"service.name": f"shardline-{service}"}))
            self._provider.add_span_processor(processor)

    @classmethod
    def from_environment(cls, service: str) -> Tracer:
        """To the OTLP endpoint that the environment names, in batches; or off."""
        return cls(service, BatchSpanProcessor(OTLPSpanExporter()) if os.environ.get(ENDPOINT) else None)

    @contextmanager
    def phase(self, name: str, *, traceparent: str | None, **attributes: Value) -> Iterator[str | None]:
        """A phase under way. Gives the `traceparent` for what follows from it; without tracing, the one that came."""
        if self._provider is None:
            yield traceparent
            return
        tracer = self._provider.get_tracer("shardline")
        with tracer.start_as_current_span(name, context=self._context(traceparent), attributes=attributes) as span:
            carrier: dict[str, str] = {}
            self._propagator.inject(carrier, set_span_in_context(span))
            yield carrier.get(HEADER)

    def close(self) -> None:
        """Send what waits."""
        if self._provider is not None:
            self._provider.shutdown()

    def _context(self, traceparent: str | None) -> Context:
        """Of whoever asked; what is no traceparent begins a trace of its own."""
        return self._propagator.extract({HEADER: traceparent} if traceparent else {}, Context())
