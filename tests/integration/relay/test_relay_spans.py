"""What relays add to the traces of jobs that heads cannot tell of: attempts of dead heads, and ends
of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlalchemy import Engine

from services.relay.relay_spans import RelaySpans
from shardline.contract.job import JobState
from shardline_server import genai
from shardline_server.store import sweeps
from shardline_server.tracing import OFF, JobTrace, Tracer, attempt_span_id
from tests.integration.rows import change, database_with_head, pass_time, running, submit

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    with database_with_head(database_url) as engine:
        yield engine


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def spans(engine: Engine, exporter: InMemorySpanExporter) -> RelaySpans:
    return RelaySpans(engine, Tracer("relay", SimpleSpanProcessor(exporter)))


def attribute(span: ReadableSpan, name: str) -> object:
    return (span.attributes or {})[name]


def test_a_cancelled_job_that_waited_has_a_span_of_its_own(
    engine: Engine, spans: RelaySpans, exporter: InMemorySpanExporter
) -> None:
    (job_id,) = submit(engine)
    change(
        engine, "UPDATE jobs SET cancel_requested_at = now(), traceparent = :caller", caller=CALLER
    )
    with engine.begin() as connection:
        moved = sweeps.sweep_stopped_queued(connection, lambda _: "")
    spans.ended(moved)

    (job,) = exporter.get_finished_spans()
    assert (job.name, attribute(job, genai.JOB_STATE)) == ("text_completion m", "cancelled")
    assert job.context.span_id == JobTrace.of(job_id, CALLER).span_id
    assert f"{job.context.trace_id:032x}" == CALLER.split("-")[1]
    assert job.status.is_unset


@pytest.mark.parametrize(
    ("crashes", "names"), [(0, ["attempt"]), (2, ["attempt", "text_completion m"])]
)
def test_the_attempt_of_a_head_that_is_gone_is_told_by_the_relay(
    engine: Engine,
    spans: RelaySpans,
    exporter: InMemorySpanExporter,
    crashes: int,
    names: list[str],
) -> None:
    claimed = running(engine)
    change(engine, "UPDATE jobs SET crashes = :crashes", crashes=crashes)
    with engine.begin() as connection:
        pass_time(connection, claimed.job_id, "lease_until")
    with engine.begin() as connection:
        moved = sweeps.sweep_expired_leases(connection, lambda _: "", lease_s=0)
    spans.rescued(moved)

    told = exporter.get_finished_spans()
    assert [span.name for span in told] == names
    assert told[0].context.span_id == attempt_span_id(claimed.job_id, claimed.fence)
    assert not told[0].status.is_ok
    assert attribute(told[0], genai.FENCE) == claimed.fence
    if crashes:
        assert attribute(told[1], genai.JOB_STATE) == str(JobState.FAILED)


def test_without_a_collector_no_row_is_asked_for(engine: Engine) -> None:
    spans = RelaySpans(engine, OFF)
    (job_id,) = submit(engine)
    change(engine, "ALTER TABLE jobs RENAME TO hidden")
    spans.ended([job_id])
    spans.prepared([job_id], 0.0)
    spans.rescued({job_id: "lost"})
