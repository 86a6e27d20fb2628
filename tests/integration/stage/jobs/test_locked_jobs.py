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

from shardline.base.config import Times
from shardline.contract.job import JobState
from shardline_server.store import sweeps
from tests.integration.rows import cell, state
from tests.integration.stage.jobs.lone_head import (
    LONG,
    LoneHead,
    saved_tokens,
    submit,
)
from tests.polling import until

IS_LATE = "SELECT lease_until < now() FROM jobs WHERE id = :id"


@contextmanager
def locked(database: Database, job_id: UUID) -> Iterator[None]:
    """Somebody is about to cancel it, and thinks better of it."""
    with database.connect() as tenant:
        tenant.execute(
            text("UPDATE jobs SET cancel_requested_at = now() WHERE id = :id"), {"id": job_id}
        )
        yield


def swept(database: Database) -> dict[UUID, str]:
    """What a relay does, once leases are over."""
    with database.begin() as connection:
        return sweeps.sweep_expired_leases(connection, lambda _: "", lease_s=0)


@pytest.mark.parametrize("times", [Times().scaled(1000)], ids=["no-heartbeat-for-long"])
def test_a_row_that_is_locked_for_a_moment_is_claimed_after_that(head: LoneHead) -> None:
    taken, other, last = (submit(head.database, 4) for _ in range(3))
    with locked(head.database, taken):
        for job_id in (taken, other):
            head.offer(job_id)
        assert [head.verdict(), head.verdict()] == [(other, "started"), (other, "succeeded")]
    head.offer(last)
    verdicts = {head.verdict() for _ in range(4)}
    assert verdicts == {(one, word) for one in (taken, last) for word in ("started", "succeeded")}


def test_a_row_that_stays_locked_gives_its_seat_back(head: LoneHead) -> None:
    taken = submit(head.database, 4)
    with locked(head.database, taken):
        head.offer(taken)
        assert head.verdict() == (taken, Ignore.__name__)
    assert state(head.database, taken) is JobState.QUEUED


def test_a_parked_job_whose_row_is_locked_begins_with_the_lock(head: LoneHead) -> None:
    head.rebuild(num_blocks=1)
    head.engine.unwire()
    first, parked = (submit(head.database, 12) for _ in range(2))
    for job_id in (first, parked):
        head.offer(job_id)
        assert head.verdict() == (job_id, "started")
    with locked(head.database, parked):
        head.rebuild(num_blocks=1)
        assert head.verdict() == (first, "succeeded")
    assert head.verdict() == (parked, "succeeded")
    assert cell(head.database, "SELECT fence FROM jobs WHERE id = :id", id=parked) == 1


def test_a_job_that_is_given_back_while_its_row_is_locked_counts_no_crash(
    head: LoneHead,
) -> None:
    head.engine.unwire()
    taken = submit(head.database, 4)
    head.offer(taken)
    assert head.verdict() == (taken, "started")
    with locked(head.database, taken):
        head.lease_manager.give_back()
        assert head.verdict() == (taken, Ignore.__name__)
        until(lambda: cell(head.database, IS_LATE, id=taken))
    assert swept(head.database) == {taken: "released"}


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
    until(lambda: saved_tokens(head.database, taken) > 0)
    with locked(head.database, taken):
        assert head.verdict() == (taken, Ignore.__name__)
        until(lambda: cell(head.database, IS_LATE, id=taken))
        num_saved = saved_tokens(head.database, other)
        until(lambda: saved_tokens(head.database, other) > num_saved)
        assert not cell(head.database, IS_LATE, id=other)
    assert swept(head.database) == {taken: "lost"}, "it saved tokens"
    assert (state(head.database, taken), state(head.database, other)) == (
        JobState.QUEUED,
        JobState.RUNNING,
    )
    assert head.lease_manager.cancel([str(other)]) == 1
    assert head.verdict() == (other, Terminated.__name__)
