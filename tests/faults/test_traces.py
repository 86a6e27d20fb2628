"""One connected trace for each job of a real stack: from its door to its COMMIT, also after a
kill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from uuid import UUID, uuid4

import httpx
import pytest

from shardline.client import Client
from shardline.contract.api_key import bearer
from shardline.contract.request_parsing import parse_request
from shardline.store.connection.database import connect
from shardline.store.inserts import insert_plainly
from shardline_server import genai
from shardline_server.failpoints import Point
from tests.chaos.faults.arming import arm
from tests.collector import Collector, Seen, collecting
from tests.faults.small_stack import MAX_TOKENS, STALL_S, TIME_SCALE
from tests.polling import until
from tests.stack import ForkedStack, Stack

CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
OF_EVERY_JOB = [
    "attempt",
    "claim",
    "commit",
    "decode",
    "prefill",
    "publish",
    "queue",
    "stage",
    "stage",
]
JOB = "text_completion clerk"
END_S = 300


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def failpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("failpoints")


@pytest.fixture(scope="module")
def stack(
    tmp_path_factory: pytest.TempPathFactory, failpoints: Path, collector: Collector
) -> Iterator[Stack]:
    """Two stages that trace."""
    stack = ForkedStack(
        tmp_path_factory.mktemp("traces"),
        SHARDLINE_TIME_SCALE=TIME_SCALE,
        SHARDLINE_STALL_S=STALL_S,
        SHARDLINE_FAILPOINTS=str(failpoints),
        SHARDLINE_LOG_FORMAT="json",
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
        OTEL_BSP_SCHEDULE_DELAY="100",
    )
    stack.start()
    yield stack
    stack.end()


def request(max_tokens: int) -> dict[str, object]:
    return {
        "model": "clerk",
        "prompt": "sort: 3, 1, 2 =",
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }


def whole(collector: Collector, trace: str, num: int) -> list[Seen]:
    """The trace once it has so many spans and the job's own."""
    until(
        lambda: len(collector.of_trace(trace)) >= num and find(collector.of_trace(trace), JOB),
        timeout_s=END_S,
    )
    return collector.of_trace(trace)


def find(spans: Sequence[Seen], name: str) -> list[Seen]:
    return [span for span in spans if span.name == name]


def unconnected(spans: Sequence[Seen]) -> list[Seen]:
    """Those whose parent is not among them."""
    known = {span.span for span in spans}
    return [span for span in spans if span.parent not in known]


def is_whole(spans: Sequence[Seen], num_attempts: int) -> bool:
    """All attempts are there, and the parents of all spans."""
    return (
        len(find(spans, "attempt")) == num_attempts and unconnected(spans) == find(spans, JOB) != []
    )


def submit_by_sql(stack: Stack, max_tokens: int) -> UUID:
    """As a producer that speaks SQL does."""
    job_id = uuid4()
    engine = connect(stack.urls["database"])
    with engine.begin() as connection:
        insert_plainly(connection, [parse_request({**request(max_tokens), "id": str(job_id)})])
    engine.dispose()
    return job_id


def test_a_request_by_http_is_one_trace_below_its_callers_span(
    stack: Stack, collector: Collector
) -> None:
    trace, parent = CALLER
    headers = {**bearer(stack.urls["api_key"]), "traceparent": f"00-{trace}-{parent}-01"}
    url = f"{stack.urls['gateway']}/v1/completions"
    reply = httpx.post(url, json=request(12), headers=headers, timeout=60).raise_for_status().json()

    spans = whole(collector, trace, 11)

    assert sorted(span.name for span in spans) == sorted([*OF_EVERY_JOB, "accept", JOB])
    (job,) = unconnected(spans)
    assert (job.name, job.parent) == (JOB, parent)
    assert {span.service for span in spans} == {
        f"shardline-{name}" for name in ("gateway", "relay", "head", "stage")
    }
    assert {span.service for span in find(spans, "stage")} == {"shardline-head", "shardline-stage"}
    assert job.attributes[genai.REQUEST_MODEL] == "clerk"
    assert job.attributes[genai.OUTPUT_TOKENS] == reply["usage"]["completion_tokens"] == 12
    assert job.attributes[genai.INPUT_TOKENS] == reply["usage"]["prompt_tokens"]
    assert job.attributes[genai.FINISH_REASONS] == ["length"]
    assert find(spans, "stage")[0].attributes[genai.STEPS]
    logs = "".join(
        path.read_text(encoding="utf-8") for path in (stack.home.folder / "logs").iterdir()
    )
    assert f'"trace_id": "{trace}"' in logs


def test_a_row_by_sql_has_the_trace_of_its_id(stack: Stack, collector: Collector) -> None:
    job_id = submit_by_sql(stack, 12)

    spans = whole(collector, job_id.hex, 11)

    assert sorted(span.name for span in spans) == sorted([*OF_EVERY_JOB, "prepare", JOB])
    (job,) = unconnected(spans)
    assert (job.name, job.parent) == (JOB, "")
    assert all(job.began_ns <= span.ended_ns for span in spans)


def test_a_row_that_can_never_run_has_a_trace_that_says_so(
    stack: Stack, collector: Collector
) -> None:
    job_id = submit_by_sql(stack, 1_000_000)

    prepare, job = sorted(whole(collector, job_id.hex, 2), key=lambda span: span.name)

    assert (prepare.name, job.name, prepare.parent) == ("prepare", JOB, job.span)
    assert (job.is_error, job.service) == (True, "shardline-relay")
    assert job.attributes[genai.JOB_STATE] == "failed"


def test_a_job_that_lost_its_head_is_one_trace_with_both_attempts(
    stack: Stack, failpoints: Path, collector: Collector
) -> None:
    arming = arm(failpoints, Point.HEARTBEAT_AFTER_COMMIT, when={"saves": "tokens"})
    with Client(database_url=stack.urls["database"], redis_url=stack.urls["redis"]) as client:
        job_id = job_when(lambda: arming.num_strikes > 0, stack, client)
        (done,) = client.wait([job_id], timeout_s=END_S)
    assert done.result is not None

    until(lambda: is_whole(collector.of_trace(job_id.hex), num_attempts=2), timeout_s=END_S)
    spans = collector.of_trace(job_id.hex)
    lost, last = sorted(find(spans, "attempt"), key=lambda span: span.began_ns)
    assert (lost.service, lost.is_error, lost.attributes[genai.OUTCOME]) == (
        "shardline-relay",
        True,
        "lost",
    )
    assert (last.service, last.is_error, last.attributes[genai.OUTCOME]) == (
        "shardline-head",
        False,
        "succeeded",
    )
    assert {span.attributes[genai.FENCE] for span in (lost, last)} == {1, 2}
    assert int(str(last.attributes[genai.NUM_RESUMED])) > 0
    assert len(find(spans, JOB)) == 1


def job_when(is_struck: Callable[[], bool], stack: Stack, client: Client) -> UUID:
    """The job that runs, the only one, when the fault has struck."""
    job_id = submit_by_sql(stack, MAX_TOKENS)

    def asked() -> bool:
        nonlocal job_id
        if client.get(job_id).state.terminal:
            job_id = submit_by_sql(stack, MAX_TOKENS)
        return is_struck()

    until(asked, timeout_s=END_S)
    return job_id
