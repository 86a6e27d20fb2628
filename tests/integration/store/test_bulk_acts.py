"""Acts on all jobs that a filter names, on a real Postgres: which are meant, what is done to them,
and what a repeat does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest
from sqlalchemy import Engine, text

from shardline.base.errors import Invalid
from shardline.contract.decision import Predicate
from shardline.contract.job import JobState
from shardline.contract.job_filter import JobFilter, parse_filter
from shardline.contract.parents.parent_job import ParentJob
from shardline.store import bulk_acts
from shardline.store.bulk_acts import Act, BulkAct, BulkProgress, bulk_act
from shardline.store.connection.database import connect
from shardline_server.store import leases, outbox
from shardline_server.store.leases import Beat
from tests.integration.rows import (
    LONG_S,
    MODEL,
    cell,
    change,
    claim,
    num_blocked,
    release,
    running,
    state,
    submit,
)
from tests.polling import until

NUM_MANY = 2_500
"""Three pages."""

ALL = JobFilter(model=MODEL)
NEW = "SELECT count(*) FROM jobs WHERE replay_of IS NOT NULL"


def do(engine: Engine, act: BulkAct, *, num_pages: int | None = None) -> int:
    """Page by page, each in a transaction, as clients do; returns how many were changed."""
    progress = BulkProgress()
    num_done = 0
    while progress.has_more and num_done != num_pages:
        with engine.begin() as connection:
            progress = bulk_acts.next_page(connection, act, progress)
        num_done += 1
    return progress.num_changed


def count(engine: Engine, act: BulkAct) -> int:
    """What a dry run says."""
    with engine.begin() as connection:
        return bulk_acts.count(connection, act)


def fail(engine: Engine, *ids: UUID, code: str = "crashed") -> None:
    """They failed with this code."""
    change(
        engine,
        "UPDATE jobs SET state = 'failed', finished_at = now(),"
        " error = jsonb_build_object('code', CAST(:code AS text)) WHERE id = ANY(:ids)",
        ids=list(ids),
        code=code,
    )


def in_batch(engine: Engine, job_id: UUID) -> str:
    """A batch with a line that is this job."""
    batch_id = uuid4()
    change(
        engine,
        "INSERT INTO batches (id, tenant_id, endpoint, input_file_id, completion_window, status,"
        " expires_at, num_lines, last_line, next_line, next_byte, first_open, fence)"
        " VALUES (:id, 'default', '/v1/completions', :id, '24h', 'in_progress', now(),"
        " 1, 1, 2, 2, 1, 0)",
        id=batch_id,
    )
    change(
        engine,
        "INSERT INTO batch_lines (batch_id, line, job_id, num_jobs, num_choices)"
        " VALUES (:batch, 1, :job, 1, 1)",
        batch=batch_id,
        job=job_id,
    )
    return f"batch_{batch_id}"


FILTERS: Mapping[str, Callable[[UUID], dict[str, Any]]] = {
    "ids": lambda meant: {"ids": [str(meant)]},
    "tenant": lambda _: {"tenant": "other"},
    "model": lambda _: {"model": "m2"},
    "kind": lambda _: {"kind": "decision"},
    "metadata": lambda _: {"metadata": {"team": "a"}},
    "created_after": lambda _: {"created_after": "2030-01-01T00:00:00Z"},
}
FIELDS: Mapping[str, dict[str, Any]] = {
    "model": {"model": "m2"},
    "kind": {"question": Predicate(instructions="It is late.")},
    "metadata": {"metadata": {"team": "a", "more": [1]}},
}


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_means_the_jobs_for_which_its_field_holds(engine: Engine, name: str) -> None:
    (other,) = submit(engine)
    (meant,) = submit(engine, **FIELDS.get(name, {}))
    if name == "tenant":
        change(engine, "INSERT INTO tenants (id) VALUES ('other') ON CONFLICT DO NOTHING")
        change(engine, "UPDATE jobs SET tenant_id = 'other' WHERE id = :id", id=meant)
    if name == "created_after":
        change(engine, "UPDATE jobs SET created_at = '2031-01-01Z' WHERE id = :id", id=meant)
    where = parse_filter(FILTERS[name](meant))
    act = bulk_act(Act.CANCEL, where)

    assert count(engine, act) == 1
    if name != "created_after":  # of jobs that are still to be created none is meant
        assert do(engine, act) == 1
        assert state(engine, meant) is JobState.CANCELLED
    assert state(engine, other) is JobState.QUEUED
    assert count(engine, bulk_act(Act.CANCEL, msgspec.structs.replace(where, state="running"))) == 0


def test_an_error_code_and_a_moment_mean_failed_jobs_of_then(engine: Engine) -> None:
    crashed, late, invalid = submit(engine, 3)
    fail(engine, crashed, late)
    fail(engine, invalid, code="invalid_request")
    change(engine, "UPDATE jobs SET created_at = '2020-01-01Z' WHERE id <> :id", id=late)
    where = {"error_code": "crashed", "created_before": "2021-01-01T00:00:00+02:00"}

    assert do(engine, bulk_act(Act.RETRY, parse_filter(where))) == 1

    assert cell(engine, "SELECT replay_of FROM jobs WHERE replay_of IS NOT NULL") == crashed


@pytest.mark.parametrize(
    ("where", "field"),
    [
        ({}, "filter"),
        ({"metadata": {}}, "metadata"),
        ({"state": "lost"}, "state"),
        ({"batch": "b"}, "batch"),
        ({"created_after": "2026-01-01T00:00:00"}, "created_after"),
        ({"ids": [str(uuid4())] * 1_001}, "ids"),
        ({"priority": 3}, "priority"),
    ],
    ids=lambda each: next(iter(each), "nothing") if isinstance(each, dict) else each,
)
def test_a_filter_that_says_nothing_or_something_unknown_is_refused(
    where: dict[str, Any], field: str
) -> None:
    with pytest.raises(Invalid) as caught:
        parse_filter(where)
    assert caught.value.field == field


@pytest.mark.parametrize("act", Act)
def test_a_state_in_which_nothing_is_left_to_do_is_refused(act: Act) -> None:
    with pytest.raises(Invalid, match="state"):
        bulk_act(act, JobFilter(state=JobState.SUCCEEDED), priority=1)


def test_many_are_cancelled_in_pages_and_a_repeat_finds_none(engine: Engine) -> None:
    submit(engine, NUM_MANY)
    held = running(engine)
    requeued = running(engine)
    release(engine, requeued)
    act = bulk_act(Act.CANCEL, ALL)
    assert count(engine, act) == NUM_MANY + 2

    assert do(engine, act, num_pages=1) == bulk_acts.PAGE_ROWS, "and here it is killed"
    assert do(engine, act) == NUM_MANY + 2 - bulk_acts.PAGE_ROWS

    by_state = "SELECT count(*) FROM jobs WHERE state = 'cancelled'"
    assert cell(engine, by_state) == NUM_MANY
    assert (count(engine, act), do(engine, act)) == (0, 0)
    assert state(engine, requeued.job_id) is JobState.QUEUED, "a relay ends it, with its tokens"
    beat = Beat(job_id=held.job_id, fence=held.fence, start=0, ids=(), logprobs=())
    with engine.begin() as connection:
        (reply,) = leases.heartbeat(connection, [beat], lease_s=LONG_S).values()
    assert reply.cancel_requested, "its head hears of it, as of any cancel"


def test_jobs_that_come_during_an_act_are_not_meant(engine: Engine) -> None:
    submit(engine, bulk_acts.PAGE_ROWS)
    act = bulk_act(Act.CANCEL, ALL)
    with engine.begin() as connection:
        progress = bulk_acts.next_page(connection, act, BulkProgress())
    (late,) = submit(engine)

    with engine.begin() as connection:
        progress = bulk_acts.next_page(connection, act, progress)

    assert (progress.num_changed, progress.has_more) == (bulk_acts.PAGE_ROWS, False)
    assert state(engine, late) is JobState.QUEUED


def test_jobs_are_retried_once_by_whoever_asks_at_the_same_time(
    engine: Engine, database_url: str
) -> None:
    failed = submit(engine, 4, metadata={"a": 1}, seed=7, priority=2)
    fail(engine, *failed)
    act = bulk_act(Act.RETRY, ALL)
    numbers: list[int] = []
    other = connect(database_url)
    try:
        with engine.begin() as connection:
            first = bulk_acts.next_page(connection, act, BulkProgress())
            second = threading.Thread(target=lambda: numbers.append(do(other, act)))
            second.start()
            until(lambda: num_blocked(engine) == 1)
        second.join()
    finally:
        other.dispose()

    assert (first.num_changed, numbers) == (4, [0])
    assert cell(engine, NEW) == 4
    same = "SELECT count(*) FROM jobs AS one JOIN jobs AS other ON other.id = one.replay_of"
    same += " WHERE (one.prompt, one.params, one.seed, one.priority, one.metadata)"
    same += " = (other.prompt, other.params, other.seed, other.priority, other.metadata)"
    assert cell(engine, same) == 4
    assert count(engine, act) == 0


def test_a_retry_that_fails_again_is_retried_and_not_what_it_retried(engine: Engine) -> None:
    (first,) = submit(engine)
    fail(engine, first)
    act = bulk_act(Act.RETRY, ALL)
    assert do(engine, act) == 1
    second = cell(engine, "SELECT id FROM jobs WHERE replay_of = :id", id=first)
    fail(engine, second)

    assert do(engine, act) == 1

    assert cell(engine, "SELECT count(*) FROM jobs WHERE replay_of = :id", id=second) == 1


def test_a_job_whose_parent_was_deleted_is_not_retried_and_holds_up_no_other(
    engine: Engine,
) -> None:
    gone, kept = submit(engine, 2)
    orphan, child = (
        submit(engine, depends_on=(ParentJob(job=parent),))[0] for parent in (gone, kept)
    )
    fail(engine, orphan, child)
    change(engine, "DELETE FROM jobs WHERE id = :id", id=gone)
    act = bulk_act(Act.RETRY, ALL)

    assert (count(engine, act), do(engine, act)) == (1, 1)

    assert cell(engine, "SELECT replay_of FROM jobs WHERE replay_of IS NOT NULL") == child
    assert (count(engine, act), do(engine, act)) == (0, 0)


def test_cancelled_jobs_are_retried_only_where_they_are_named(engine: Engine) -> None:
    ids = submit(engine, 2)
    assert do(engine, bulk_act(Act.CANCEL, ALL)) == 2

    assert do(engine, bulk_act(Act.RETRY, ALL)) == 0
    assert do(engine, bulk_act(Act.RETRY, JobFilter(ids=(ids[0],)))) == 1
    assert do(engine, bulk_act(Act.RETRY, JobFilter(state=JobState.CANCELLED))) == 1


def test_queued_jobs_are_sent_again_with_their_new_priority(engine: Engine) -> None:
    ids = submit(engine, 3)
    (held,) = claim(engine, [ids[0]])
    with engine.begin() as connection:
        assert {send.priority for send in outbox.stamp_due(connection, resend_s=LONG_S)} == {5}
    act = bulk_act(Act.PRIORITIZE, ALL, priority=1)

    assert do(engine, act) == 2

    with engine.begin() as connection:
        sent = outbox.stamp_due(connection, resend_s=LONG_S)
    assert {(send.job_id, send.priority) for send in sent} == {(ids[1], 1), (ids[2], 1)}
    assert cell(engine, "SELECT priority FROM jobs WHERE id = :id", id=held.job_id) == 5
    assert (count(engine, act), do(engine, act)) == (0, 0)


def test_a_batch_means_the_jobs_of_its_lines_and_their_choices(engine: Engine) -> None:
    first, choice, other = submit(engine, 3)
    change(
        engine,
        "UPDATE jobs SET choice_of = :first, choice_index = 1 WHERE id = :id",
        first=first,
        id=choice,
    )
    batch = in_batch(engine, first)

    assert do(engine, bulk_act(Act.CANCEL, JobFilter(batch=batch))) == 2

    assert state(engine, other) is JobState.QUEUED


def test_a_page_that_fails_changes_nothing_of_it(engine: Engine) -> None:
    failed = submit(engine, 3)
    fail(engine, *failed)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE jobs ADD CONSTRAINT few CHECK (replay_of IS NULL)"))
    with pytest.raises(Exception, match="few"):
        do(engine, bulk_act(Act.RETRY, ALL))
    change(engine, "ALTER TABLE jobs DROP CONSTRAINT few")

    assert do(engine, bulk_act(Act.RETRY, ALL)) == 3
