"""A tenant's transaction keeps the row of a running job locked: its head goes on with all others,
and the job ends once the lock does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

import pytest
from celery.exceptions import Ignore, Terminated
from sqlalchemy import Engine as Database
from sqlalchemy import text

from services.stage.engine.executor import Executor
from shardline.contract.job import JobState
from shardline_server.store import sweeps
from tests.integration.rows import cell, state
from tests.integration.stage.jobs.lone_head import (
    LONG,
    TIMES,
    LoneHead,
    open_lone_head,
    saved_tokens,
    submit,
)
from tests.polling import until

IS_LATE = "SELECT lease_until < now() FROM jobs WHERE id = :id"


@pytest.fixture
def head(database: Database, executor: Executor, redis_url: str) -> Iterator[LoneHead]:
    """Ready to take jobs."""
    with open_lone_head(database, executor, redis_url, TIMES) as head:
        yield head


@contextmanager
def locked(database: Database, job_id: UUID) -> Iterator[None]:
    """Somebody is about to cancel it, and thinks better of it."""
    with database.connect() as tenant:
        tenant.execute(
            text("UPDATE jobs SET cancel_requested_at = now() WHERE id = :id"), {"id": job_id}
        )
        yield


def test_a_finished_job_whose_row_is_locked_ends_with_the_lock(head: LoneHead) -> None:
    head.engine.unwire()
    taken = submit(head.database, 4)
    head.offer(taken)
    assert head.verdict() == (taken, "started")
    with locked(head.database, taken):
        head.rebuild(num_blocks=8)
        until(lambda: head.lease_manager.stats()["uncommitted"] == 1)
        other = submit(head.database, 4)
        head.offer(other)
        assert [head.verdict(), head.verdict()] == [(other, "started"), (other, "succeeded")]
    assert head.verdict() == (taken, "succeeded")
    assert cell(head.database, "SELECT fence FROM jobs WHERE id = :id", id=taken) == 1


def test_a_lock_that_outlasts_a_lease_ends_one_attempt_and_stops_no_other(
    head: LoneHead,
) -> None:
    taken = submit(head.database, LONG)
    other = submit(head.database, LONG)
    for job_id in (taken, other):
        head.offer(job_id)
        assert head.verdict() == (job_id, "started")
    with locked(head.database, taken):
        assert head.verdict() == (taken, Ignore.__name__)
        until(lambda: cell(head.database, IS_LATE, id=taken))
        num_saved = saved_tokens(head.database, other)
        until(lambda: saved_tokens(head.database, other) > num_saved)
        assert not cell(head.database, IS_LATE, id=other)
    with head.database.begin() as connection:
        moved = sweeps.sweep_expired_leases(connection, lambda _: "", lease_s=0)
    assert moved == {taken: "released"}
    assert (state(head.database, taken), state(head.database, other)) == (
        JobState.QUEUED,
        JobState.RUNNING,
    )
    assert head.lease_manager.cancel([str(other)]) == 1
    assert head.verdict() == (other, Terminated.__name__)
