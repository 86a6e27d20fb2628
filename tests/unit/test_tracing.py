"""Traces: every process finds a job's trace in its row, and no collector is waited for."""

from __future__ import annotations

import uuid

import msgspec
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from services.stage.stage_spans import StageSpans
from shardline.contract.job import SamplingParams
from shardline_scheduler.step_plan import Open, Row, StepPlan
from shardline_scheduler.step_times import EngineProgress, StepTime
from shardline_server import genai
from shardline_server.tracing import (
    ENDPOINTS,
    JobTrace,
    TracedPhase,
    Tracer,
    attempt_span_id,
    parse_traceparent,
    traceparent,
)
from tests.collector import Collector, collecting
from tests.polling import until

JOB = uuid.UUID("0192f0c1-53a5-7f43-9c0b-7a8f0f2d4b11")
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = f"{CALLER[:-2]}00"


def phase(name: str = "accept", **attributes: str) -> TracedPhase:
    return TracedPhase(name=name, began_s=1.0, ended_s=2.0, attributes=attributes)


def tracer(exporter: InMemorySpanExporter, service: str = "gateway") -> Tracer:
    return Tracer(service, SimpleSpanProcessor(exporter))


def test_phases_of_two_processes_are_below_the_jobs_own_span_in_the_callers_trace() -> None:
    exporter = InMemorySpanExporter()
    trace = JobTrace.of(JOB, CALLER)
    tracer(exporter).phase(trace, phase(model="clerk"))
    tracer(exporter, "head").job(JobTrace.of(JOB, CALLER), phase("job"))

    accept, job = exporter.get_finished_spans()
    assert (
        f"{accept.context.trace_id:032x}" == f"{job.context.trace_id:032x}" == CALLER.split("-")[1]
    )
    assert accept.parent is not None
    assert accept.parent.span_id == job.context.span_id
    assert job.parent is not None
    assert f"{job.parent.span_id:016x}" == CALLER.split("-")[2]
    assert dict(accept.attributes or {}) == {"model": "clerk"}
    assert accept.resource.attributes["service.name"] == "shardline-gateway"
    assert accept.end_time is not None
    assert accept.start_time is not None
    assert accept.end_time - accept.start_time == pytest.approx(1e9)


@pytest.mark.parametrize(
    "given", [None, "", "nonsense", "00-0-0-01", f"00-{'0' * 32}-{'0' * 16}-01", "x" * 5000]
)
def test_a_job_without_a_callers_trace_has_that_of_its_id(given: str | None) -> None:
    exporter = InMemorySpanExporter()
    tracer(exporter).job(JobTrace.of(JOB, given), phase("job"))
    (span,) = exporter.get_finished_spans()
    assert span.parent is None
    assert f"{span.context.trace_id:032x}" == JOB.hex == JobTrace.of(JOB, given).trace


def test_what_the_caller_or_the_sampler_leaves_out_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exporter = InMemorySpanExporter()
    tracer(exporter).phase(JobTrace.of(JOB, UNSAMPLED), phase())
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    tracer(exporter).phase(JobTrace.of(JOB, None), phase())
    assert exporter.get_finished_spans() == ()
    tracer(exporter).phase(JobTrace.of(JOB, CALLER), phase())
    assert len(exporter.get_finished_spans()) == 1


def test_stages_get_the_attempts_span_by_name() -> None:
    trace = JobTrace.of(JOB, CALLER)
    below = parse_traceparent(traceparent(trace, attempt_span_id(JOB, 3)))
    assert below is not None
    assert (below.trace_id, below.span_id) == (trace.trace_id, attempt_span_id(JOB, 3))
    assert attempt_span_id(JOB, 3) != attempt_span_id(JOB, 4)


@pytest.mark.parametrize("variable", ENDPOINTS)
def test_only_an_endpoint_turns_it_on(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    off = Tracer.from_environment("gateway")
    assert not off.is_on
    off.phase(JobTrace.of(JOB, CALLER), phase())
    off.close()

    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    on = Tracer.from_environment("gateway")
    assert on.is_on
    on.close()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not Tracer.from_environment("gateway").is_on


def test_a_collector_that_hangs_costs_the_oldest_spans_and_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with collecting() as collector:
        collector.answers.clear()
        monkeypatch.setenv(ENDPOINTS[0], collector.url)
        monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
        monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
        hung = Tracer.from_environment("head")
        for number in range(100):
            hung.phase(JobTrace.of(JOB, None), phase(str(number)))
        assert collector.spans == []
        collector.answers.set()
        until(lambda: "99" in names(collector), timeout_s=60)
        hung.close()
    assert len(collector.spans) <= 4 + 8, "a batch under way and the queue"


def names(collector: Collector) -> set[str]:
    return {span.name for span in list(collector.spans)}


def opened(seq: int, trace: str = "") -> Open:
    return Open(
        seq=seq, ids=(5,), num_prompt=1, params=SamplingParams(), seed=1, num_blocks=1, trace=trace
    )


def step(
    number: int,
    *,
    opens: tuple[Open, ...] = (),
    seqs: tuple[int, ...] = (),
    closes: tuple[int, ...] = (),
) -> StepPlan:
    rows = tuple(Row(seq, 0, 1, (5,), (), wants=True) for seq in seqs)
    return StepPlan(number, opens, rows, closes)


def took(plan: StepPlan, epoch: int = 1) -> StepTime:
    began_s = float(plan.step)
    progress = EngineProgress(epoch=epoch)
    return progress.finish(
        plan, began_s, compute_began_s=began_s, computed_s=began_s + 0.5, ended_s=began_s + 0.75
    )


def test_a_stage_has_a_span_for_each_traced_sequence_from_its_first_step_to_its_last() -> None:
    exporter = InMemorySpanExporter()
    spans = StageSpans(tracer(exporter, "stage"), {genai.WORKER: "w"})
    parent = attempt_span_id(JOB, 1)
    named = traceparent(JobTrace.of(JOB, None), parent)
    plans = [
        step(1, opens=(opened(1, named), opened(2)), seqs=(1, 2)),
        step(2, seqs=(1, 2)),
        step(3, seqs=(2,), closes=(1, 2)),
    ]
    for plan in plans:
        spans.step(plan, took(plan))

    (span,) = exporter.get_finished_spans()
    assert span.parent is not None
    assert (span.parent.span_id, span.context.trace_id) == (parent, JOB.int)
    attributes = dict(span.attributes or {})
    assert (attributes[genai.STEPS], attributes[genai.COMPUTE_S], attributes[genai.WORKER]) == (
        2,
        1.0,
        "w",
    )
    assert span.end_time is not None
    assert span.start_time is not None
    assert span.end_time - span.start_time == pytest.approx(1.75e9)


def test_a_stage_ends_its_spans_when_the_pipeline_broke_under_them() -> None:
    exporter = InMemorySpanExporter()
    spans = StageSpans(tracer(exporter, "stage"), {})
    named = traceparent(JobTrace.of(JOB, None), attempt_span_id(JOB, 1))
    first = step(1, opens=(opened(1, named),), seqs=(1,))
    other = step(0)
    spans.step(first, took(first))
    assert exporter.get_finished_spans() == ()
    spans.step(other, took(other, epoch=2))
    assert len(exporter.get_finished_spans()) == 1


def test_stages_without_the_field_read_past_it_and_miss_nothing() -> None:
    class Before(msgspec.Struct, array_like=True):
        seq: int
        ids: tuple[int, ...]

    written = msgspec.msgpack.encode(opened(1, "t"))
    assert msgspec.msgpack.decode(written, type=Before).ids == (5,)
    fields = msgspec.msgpack.decode(written)[: Open.__struct_fields__.index("trace")]
    old = msgspec.msgpack.encode(fields)
    assert msgspec.msgpack.decode(old, type=Open) == opened(1)


def test_names_of_attributes_are_those_of_the_conventions() -> None:
    ours = {
        value
        for name, value in vars(genai).items()
        if name.isupper() and value.startswith("gen_ai.")
    }
    assert len(ours) > 10
    assert ours <= {
        value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")
    }
