"""A trigger of an operator refuses the end of one job: the head's other jobs end, live and keep
their leases, and the refused one ends otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import pytest
from celery.exceptions import Ignore, Terminated
from sqlalchemy import Engine as Database
from sqlalchemy import text

from services.stage.engine.executor import Executor
from shardline.base.errors import JobFailed
from shardline.contract.job import FinishReason, JobState
from shardline_scheduler.events import SequenceFinished
from tests.integration.rows import cell, change, state
from tests.integration.stage.jobs.lone_head import (
    LONG,
    TIMES,
    LoneHead,
    open_lone_head,
    saved_tokens,
    submit,
)
from tests.polling import until

REFUSE = """
CREATE SEQUENCE tries;
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    -- No rollback takes back what a sequence counted.
    IF nextval('tries') <= {num_tries} THEN
        RAISE EXCEPTION 'not in this house' USING ERRCODE = '{sqlstate}';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON {table}
FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION refuse()
"""
ALWAYS = 1_000_000
OUTCOMES = "SELECT array_agg(outcome ORDER BY fence) FROM attempts WHERE job_id = :id"


@pytest.fixture
def idle(database: Database, executor: Executor, redis_url: str) -> Iterator[LoneHead]:
    """Ready to take jobs, with an engine that computes nothing."""
    with open_lone_head(database, executor, redis_url, TIMES) as head:
        head.engine.unwire()
        yield head


def refuse(
    database: Database,
    table: str,
    condition: str,
    *,
    num_tries: int = ALWAYS,
    sqlstate: str = "P0001",
) -> None:
    """Somebody's trigger, which gives in after this many tries."""
    with database.begin() as connection:
        connection.execute(
            text(
                REFUSE.format(
                    table=table, condition=condition, num_tries=num_tries, sqlstate=sqlstate
                )
            )
        )


def started(head: LoneHead, num_jobs: int) -> list[UUID]:
    """Jobs that the head has claimed."""
    ids = [submit(head.database, LONG) for _ in range(num_jobs)]
    for job_id in ids:
        head.offer(job_id)
        assert head.verdict() == (job_id, "started")
    return ids


def finish(head: LoneHead, *ids: UUID) -> dict[UUID, str]:
    """The engine ends their first attempts at once; what Celery is told of each."""
    head.lease_manager.report(
        [
            SequenceFinished(
                key=(str(job_id), 1),
                reason=FinishReason.STOP,
                output_ids=(7, 8),
                text="ab",
                tail="",
                num_cached=0,
                logprobs=None,
            )
            for job_id in ids
        ]
    )
    return dict(head.verdict() for _ in ids)


def test_neighbors_of_a_refused_end_succeed_in_their_first_attempt(idle: LoneHead) -> None:
    first, refused, last = started(idle, 3)
    refuse(idle.database, "results", f"NEW.job_id = '{refused}'")
    assert finish(idle, first, refused, last) == {
        first: "succeeded",
        last: "succeeded",
        refused: JobFailed.__name__,
    }
    assert [cell(idle.database, OUTCOMES, id=one) for one in (first, last)] == [["succeeded"]] * 2
    error = cell(idle.database, "SELECT error FROM jobs WHERE id = :id", id=refused)
    assert error == {
        "code": "refused_by_database",
        "problem": "Postgres refuses its result (SQLSTATE P0001): not in this house",
    }
    assert idle.lease_manager.stats()["uncommitted"] == 0


def test_a_refused_end_succeeds_once_the_trigger_lets_it(idle: LoneHead) -> None:
    (refused,) = started(idle, 1)
    refuse(idle.database, "results", f"NEW.job_id = '{refused}'", num_tries=3)
    assert finish(idle, refused) == {refused: "succeeded"}
    assert cell(idle.database, OUTCOMES, id=refused) == ["succeeded"]


def test_a_job_that_cannot_even_fail_waits_with_its_tokens(idle: LoneHead) -> None:
    refused, other = started(idle, 2)
    condition = f"NEW.id = '{refused}' AND NEW.state IN ('succeeded', 'failed')"
    refuse(idle.database, "jobs", condition)
    assert finish(idle, refused, other) == {refused: Ignore.__name__, other: "succeeded"}
    assert state(idle.database, refused) is JobState.QUEUED
    assert cell(idle.database, OUTCOMES, id=refused) == ["failed"]
    waits = "SELECT extract(epoch FROM not_before - requeued_at)::float8 FROM jobs WHERE id = :id"
    assert 30 <= cell(idle.database, waits, id=refused) <= 60


def test_a_job_whose_row_cannot_change_at_all_is_let_go(idle: LoneHead) -> None:
    refused, other = started(idle, 2)
    refuse(idle.database, "jobs", f"NEW.id = '{refused}'")
    assert finish(idle, refused, other) == {refused: Ignore.__name__, other: "succeeded"}
    assert state(idle.database, refused) is JobState.RUNNING


@pytest.mark.parametrize("sqlstate", ["53100", "42P01", "P0001"])
def test_leases_are_renewed_while_ends_are_refused(head: LoneHead, sqlstate: str) -> None:
    (running,) = started(head, 1)
    refuse(head.database, "results", f"NEW.job_id <> '{running}'", sqlstate=sqlstate)
    ending = submit(head.database, 4)
    head.offer(ending)
    assert head.verdict() == (ending, "started")
    until(lambda: head.lease_manager.stats()["uncommitted"])
    num_saved = saved_tokens(head.database, running)
    until(lambda: saved_tokens(head.database, running) > num_saved)
    change(head.database, "DROP TRIGGER refuse ON results")
    assert head.verdict()[0] == ending
    assert head.lease_manager.cancel([str(running)]) == 1
    assert head.verdict() == (running, Terminated.__name__)
    assert cell(head.database, OUTCOMES, id=running) == ["cancelled"]
