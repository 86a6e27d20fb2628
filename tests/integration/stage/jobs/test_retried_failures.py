"""A job that a head's engine ends alone: tried again after its policy's wait, or over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast
from uuid import UUID

import pytest
from celery.exceptions import Ignore
from redis import Redis
from sqlalchemy import Engine as Database

from services.stage.engine.executor import Executor
from shardline.base.errors import JobFailed
from shardline.contract.job import JobState
from shardline.contract.keys import job_stream
from shardline.contract.retry_policy import RetryPolicy
from shardline.contract.wire import Delta, decode_delta
from shardline_scheduler.events import NewTokens, SequenceFailed
from tests.integration.rows import cell, change, state
from tests.integration.stage.jobs.lone_head import LONG, TIMES, LoneHead, open_lone_head, submit
from tests.polling import until

NOT_FINITE = "its logits are not finite"
OUTCOMES = "SELECT array_agg(outcome ORDER BY fence) FROM attempts"
DUE = "UPDATE jobs SET not_before = now()"


@pytest.fixture
def head(database: Database, executor: Executor, redis_url: str) -> Iterator[LoneHead]:
    """Ready to take jobs, with an engine that computes nothing."""
    with open_lone_head(database, executor, redis_url, TIMES) as head:
        head.engine.unwire()
        yield head


def fail(head: LoneHead, job_id: UUID, fence: int, *ids: int) -> str:
    """An attempt that gets these tokens and fails; what Celery is told of it."""
    head.offer(job_id)
    assert head.verdict() == (job_id, "started")
    key = (str(job_id), fence)
    new = [NewTokens(key=key, start=0, ids=ids, text="", logprobs=())] if ids else []
    head.lease_manager.report([*new, SequenceFailed(key=key, reason=NOT_FINITE)])
    found, verdict = head.verdict()
    assert found == job_id
    return verdict


def test_a_failure_that_a_policy_names_is_tried_again_until_its_last_attempt(
    head: LoneHead, redis_url: str
) -> None:
    policy = RetryPolicy(max_attempts=3, backoff_s=100, on=("engine",))
    job_id = submit(head.database, LONG, retry=policy)
    assert fail(head, job_id, 1, 7, 8) == Ignore.__name__
    assert state(head.database, job_id) is JobState.QUEUED
    assert cell(head.database, "SELECT tokens FROM attempts") == [7, 8]
    waits = "SELECT extract(epoch FROM not_before - requeued_at)::float8 FROM jobs"
    assert 50 <= cell(head.database, waits) <= 100
    change(head.database, DUE)
    assert fail(head, job_id, 2) == Ignore.__name__
    assert 100 <= cell(head.database, waits) <= 200
    change(head.database, DUE)
    assert fail(head, job_id, 3) == JobFailed.__name__
    assert cell(head.database, OUTCOMES) == ["failed"] * 3
    assert cell(head.database, "SELECT error FROM jobs") == {
        "code": "engine",
        "problem": NOT_FINITE,
    }
    assert cell(head.database, "SELECT crashes FROM jobs") == 0
    with Redis.from_url(redis_url) as client:
        ends = until(lambda: [one for one in deltas(client, job_id) if one.state is not None])
    assert [one.fence for one in ends] == [3], "readers hear of the last end alone"


@pytest.mark.parametrize("retry", [None, RetryPolicy(max_attempts=9)], ids=["none", "of crashes"])
def test_a_failure_that_no_policy_names_ends_its_job(
    head: LoneHead, retry: RetryPolicy | None
) -> None:
    job_id = submit(head.database, LONG, retry=retry)
    assert fail(head, job_id, 1) == JobFailed.__name__
    assert state(head.database, job_id) is JobState.FAILED


def deltas(client: Redis, job_id: UUID) -> list[Delta]:
    """All that a job's stream holds."""
    entries = cast(list[tuple[bytes, dict[bytes, bytes]]], client.xrange(job_stream(job_id)))
    return [decode_delta(data) for _, fields in entries for data in fields.values()]
