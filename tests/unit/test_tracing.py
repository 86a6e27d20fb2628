"""Traces: phases of one job, in any process, belong to one trace; without an endpoint nothing happens."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from shardline.tracing import ENDPOINT, Tracer

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_all_phases_are_in_the_callers_trace() -> None:
    exporter = InMemorySpanExporter()
    gateway, head = (Tracer(name, SimpleSpanProcessor(exporter)) for name in ("gateway", "head"))
    with gateway.phase("accept", traceparent=CALLER, model="clerk") as passed_on:
        pass
    with head.phase("run", traceparent=passed_on, num_tokens=3):
        pass

    accept, run = exporter.get_finished_spans()

    assert f"{accept.context.trace_id:032x}" == f"{run.context.trace_id:032x}" == CALLER.split("-")[1]
    assert accept.parent is not None
    assert f"{accept.parent.span_id:016x}" == CALLER.split("-")[2]
    assert run.parent is not None
    assert run.parent.span_id == accept.context.span_id
    assert dict(run.attributes or {}) == {"num_tokens": 3}
    assert accept.resource.attributes["service.name"] == "shardline-gateway"


@pytest.mark.parametrize("traceparent", [None, "nonsense"])
def test_a_phase_without_a_trace_begins_one(traceparent: str | None) -> None:
    exporter = InMemorySpanExporter()
    with Tracer("gateway", SimpleSpanProcessor(exporter)).phase("accept", traceparent=traceparent) as passed_on:
        pass
    (span,) = exporter.get_finished_spans()
    assert span.parent is None
    assert passed_on is not None
    assert f"{span.context.span_id:016x}" in passed_on


def test_the_callers_trace_passes_through_without_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENDPOINT, raising=False)
    tracer = Tracer.from_environment("gateway")
    with tracer.phase("accept", traceparent=CALLER) as passed_on:
        assert passed_on == CALLER
    tracer.close()
