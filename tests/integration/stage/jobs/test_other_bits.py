"""What becomes of running jobs when a pipeline forms anew with stages that compute other bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from celery.exceptions import Ignore
from sqlalchemy import Engine as Database

from shardline.base.config import Times
from shardline.contract.job import JobState
from shardline.store import jobs
from tests.integration.rows import cell, database_with_head, request, state
from tests.integration.stage.jobs.lone_head import LoneHead, open_lone_head, tiny_executor
from tests.polling import until

LONG = 4_000
"""More tokens than the test lets the job reach."""


@pytest.fixture
def head(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[LoneHead]:
    """Ready to take jobs, of exactness `x`."""
    with (
        database_with_head(database_url) as database,
        tiny_executor(tmp_path) as executor,
        open_lone_head(database, executor, redis_url, Times().scaled(0.2)) as head,
    ):
        yield head


def num_saved(database: Database) -> int:
    """Tokens of the job's attempt in Postgres."""
    return int(cell(database, "SELECT coalesce(max(cardinality(tokens)), 0) FROM attempts"))


def test_an_exact_job_leaves_a_pipeline_whose_bits_are_others_now(head: LoneHead) -> None:
    with head.database.begin() as connection:
        wanted = request(max_tokens=LONG, ignore_eos=True)
        (job,) = jobs.insert_jobs(connection, [wanted], prepared=[((5, 6), LONG)])
    head.offer(job.job_id)
    assert head.verdict() == (job.job_id, "started")
    until(lambda: num_saved(head.database) > 0)

    head.rebuild(head.executor.num_blocks, exactness="y")

    assert head.verdict() == (job.job_id, Ignore.__name__)
    assert state(head.database, job.job_id) is JobState.QUEUED
    head.offer(job.job_id)
    assert head.verdict() == (job.job_id, Ignore.__name__), "for a while it waits for the same bits"
    head.rebuild(head.executor.num_blocks, exactness="x")
    head.offer(job.job_id)
    assert head.verdict() == (job.job_id, "started")
    assert cell(head.database, "SELECT exact FROM jobs") is True
