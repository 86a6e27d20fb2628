"""Jobs with a retry policy on a real Postgres: how often a failed attempt is tried again, when, and
that a death at any moment changes nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from shardline.client import Client
from shardline.contract.job import Job, JobRequest, JobState
from shardline.contract.retry_policy import RetryPolicy
from shardline.store import jobs
from shardline.store.schedules import schedule_rows
from shardline.store.schedules.schedule_rows import NewSchedule
from shardline_server.store import crashes, due_schedules, leases, sweeps
from shardline_server.store.claims import ClaimedJob
from shardline_server.store.crashes import AttemptLimits
from shardline_server.store.leases import Beat
from tests.integration.rows import MODEL, cell, change, claim, end, state, submit, success

FIVE = RetryPolicy(max_attempts=5, backoff_s=10, max_backoff_s=60)
BOTH = RetryPolicy(max_attempts=3, on=("crashed", "engine"))
EXPIRED = (
    "UPDATE jobs SET lease_until = now() - interval '1 hour' WHERE id = :id AND state = 'running'"
)
WAITED = "UPDATE jobs SET not_before = now() WHERE id = :id"
Fail = Callable[[Engine, ClaimedJob], str | None]


def read(engine: Engine, job_id: UUID) -> Job:
    with engine.begin() as connection:
        job = jobs.get_job(connection, job_id)
    assert job is not None
    return job


def sweep(connection: Connection, **values: Any) -> dict[UUID, str]:
    return sweeps.sweep_expired_leases(connection, lambda _: "", lease_s=0.001, **values)


def expire(engine: Engine, claimed: ClaimedJob) -> None:
    change(engine, EXPIRED, id=claimed.job_id)


def crash(engine: Engine, claimed: ClaimedJob) -> str | None:
    """Its head dies before a token is saved."""
    expire(engine, claimed)
    with engine.begin() as connection:
        return sweep(connection).get(claimed.job_id)


def fail(engine: Engine, claimed: ClaimedJob) -> str | None:
    """Its head's engine ends it alone."""
    with engine.begin() as connection:
        held = [(claimed.job_id, claimed.fence)]
        again = crashes.requeue_failed_held(connection, held)
    return "failed" if again.get(claimed.job_id) else None


def attempt(engine: Engine, job_id: UUID) -> ClaimedJob:
    """The next one, as soon as it may begin."""
    change(engine, WAITED, id=job_id)
    (claimed,) = claim(engine, [job_id])
    return claimed


@pytest.mark.parametrize(
    ("fields", "num_attempts"),
    [
        ({}, 3),
        ({"retry": RetryPolicy(max_attempts=1)}, 1),
        ({"retry": FIVE}, 5),
        ({"retry": RetryPolicy(max_attempts=4, on=("engine",))}, 1),
    ],
    ids=["none", "one", "five", "another failure"],
)
def test_a_job_ends_with_the_crash_that_uses_up_its_attempts(
    engine: Engine, fields: dict[str, Any], num_attempts: int
) -> None:
    (job_id,) = submit(engine, **fields)
    outcomes = [crash(engine, attempt(engine, job_id)) for _ in range(num_attempts)]
    assert outcomes == ["crashed"] * (num_attempts - 1) + ["failed"]
    job = read(engine, job_id)
    assert (job.state, job.attempts, (job.error or {})["code"]) == (
        JobState.FAILED,
        num_attempts,
        "crashed",
    )
    assert claim(engine, [job_id]) == []


def test_the_installations_ceiling_is_the_most_of_any_policy(engine: Engine) -> None:
    (job_id,) = submit(engine, retry=FIVE)
    limits = AttemptLimits(max_attempts=2)
    found: list[str] = []
    for _ in range(2):
        expire(engine, attempt(engine, job_id))
        with engine.begin() as connection:
            found += sweep(connection, limits=limits).values()
    assert found == ["crashed", "failed"]


def test_each_wait_is_written_with_the_end_of_its_attempt(engine: Engine) -> None:
    (job_id,) = submit(engine, retry=FIVE)
    longest = [timedelta(seconds=wait_s) for wait_s in (10, 20, 40, 60)]
    for wait in longest:
        assert crash(engine, attempt(engine, job_id)) == "crashed"
        assert claim(engine, [job_id]) == [], "its wait is not over"
        with engine.begin() as connection:
            row = connection.execute(
                text(
                    "SELECT not_before - requeued_at AS waits, ended_at = requeued_at AS is_one"
                    " FROM jobs JOIN attempts ON job_id = id AND attempts.fence = jobs.fence"
                )
            ).one()
        assert wait / 2 <= row.waits <= wait
        assert row.is_one
        assert read(engine, job_id).next_attempt_at == cell(engine, "SELECT not_before FROM jobs")


def test_jobs_that_fail_together_do_not_come_back_together(engine: Engine) -> None:
    ids = [submit(engine, retry=FIVE)[0] for _ in range(8)]
    for claimed in claim(engine, ids):
        expire(engine, claimed)
    with engine.begin() as connection:
        assert set(sweep(connection).values()) == {"crashed"}
    assert cell(engine, "SELECT count(DISTINCT requeued_at) FROM jobs") == 1
    assert cell(engine, "SELECT count(DISTINCT not_before) FROM jobs") == len(ids)


def test_without_a_policy_a_crash_is_tried_again_at_once(engine: Engine) -> None:
    (job_id,) = submit(engine)
    due = cell(engine, "SELECT not_before FROM jobs")
    (claimed,) = claim(engine, [job_id])
    crash(engine, claimed)
    assert cell(engine, "SELECT not_before FROM jobs") == due
    assert [one.fence for one in claim(engine, [job_id])] == [2]


def test_an_attempt_goes_on_from_the_tokens_of_those_that_failed(engine: Engine) -> None:
    (job_id,) = submit(engine, retry=BOTH)
    first = attempt(engine, job_id)
    beat = Beat(job_id=job_id, fence=first.fence, start=0, ids=(7, 8))
    with engine.begin() as connection:
        leases.heartbeat(connection, [beat], lease_s=60)
    assert fail(engine, first) == "failed"
    second = attempt(engine, job_id)
    assert (second.output_ids, second.crashes) == ((7, 8), 0)
    expire(engine, second)
    assert crash(engine, second) == "crashed"
    third = attempt(engine, job_id)
    assert (third.output_ids, third.crashes) == ((7, 8), 1)
    assert end(engine, success(third)) == {job_id: JobState.SUCCEEDED}
    outcomes = "SELECT array_agg(outcome ORDER BY fence) FROM attempts"
    assert cell(engine, outcomes) == ["failed", "crashed", "succeeded"]


def test_tokens_saved_before_a_death_are_no_failure(engine: Engine) -> None:
    (job_id,) = submit(engine, retry=RetryPolicy(max_attempts=1))
    claimed = attempt(engine, job_id)
    beat = Beat(job_id=job_id, fence=claimed.fence, start=0, ids=(7,))
    with engine.begin() as connection:
        leases.heartbeat(connection, [beat], lease_s=60)
    assert crash(engine, claimed) == "lost"
    assert [one.output_ids for one in claim(engine, [job_id])] == [(7,)]


@pytest.mark.parametrize("failures", [(fail, fail), (crash, fail), (fail, crash)])
def test_failures_of_both_kinds_use_up_the_same_attempts(
    engine: Engine, failures: tuple[Fail, ...]
) -> None:
    (job_id,) = submit(engine, retry=BOTH)
    for one in failures:
        assert one(engine, attempt(engine, job_id)) is not None
    assert fail(engine, attempt(engine, job_id)) is None, "its head ends it"


@pytest.mark.parametrize("retry", [None, FIVE], ids=["no policy", "of crashes"])
def test_a_failure_that_no_policy_names_is_its_heads_to_end(
    engine: Engine, retry: RetryPolicy | None
) -> None:
    (job_id,) = submit(engine, retry=retry)
    assert fail(engine, attempt(engine, job_id)) is None
    assert state(engine, job_id) is JobState.RUNNING


def die_before_commit(engine: Engine, claimed: ClaimedJob, fail_it: Fail) -> None:
    """Postgres has decided, and its client is gone."""
    with engine.begin() as connection:
        if fail_it is crash:
            assert sweep(connection) == {claimed.job_id: "crashed"}
        else:
            held = [(claimed.job_id, claimed.fence)]
            assert all(crashes.requeue_failed_held(connection, held).values())
        killed = connection.scalar(text("SELECT pg_backend_pid()"))
        cell(engine, "SELECT pg_terminate_backend(:pid)", pid=killed)


@pytest.mark.parametrize("fail_it", [crash, fail])
def test_a_relay_or_head_that_dies_before_its_commit_has_changed_nothing(
    engine: Engine, fail_it: Fail
) -> None:
    (job_id,) = submit(engine, retry=BOTH)
    claimed = attempt(engine, job_id)
    before = "SELECT row_to_json(jobs) FROM jobs"
    expire(engine, claimed)
    known = cell(engine, before)
    with pytest.raises(DBAPIError):
        die_before_commit(engine, claimed, fail_it)
    assert cell(engine, before) == known
    assert fail_it(engine, claimed) is not None
    assert fail_it(engine, claimed) is None, "once"
    assert read(engine, job_id).attempts == 1


def test_of_relays_that_sweep_at_once_one_ends_the_last_attempt(engine: Engine) -> None:
    ids = [submit(engine, retry=RetryPolicy(max_attempts=1))[0] for _ in range(20)]
    for claimed in claim(engine, ids):
        expire(engine, claimed)
    together = Barrier(4)

    def relay() -> list[UUID]:
        together.wait()
        with engine.begin() as connection:
            return [*sweep(connection, max_batch=7)]

    with ThreadPoolExecutor(4) as pool:
        found = [future.result() for future in [pool.submit(relay) for _ in range(4)]]
    ended = [job_id for one in found for job_id in one]
    assert sorted(ended) == sorted(set(ended))
    with engine.begin() as connection:
        sweep(connection)
    assert {state(engine, job_id) for job_id in ids} == {JobState.FAILED}


def test_a_policy_that_a_hand_has_spoiled_is_none_and_holds_up_nobody(engine: Engine) -> None:
    spoiled, good = submit(engine, retry=FIVE)[0], submit(engine, retry=FIVE)[0]
    change(
        engine,
        """UPDATE jobs SET retry = '{"max_attempts": 1e400, "on": 5}' WHERE id = :id""",
        id=spoiled,
    )
    for claimed in claim(engine, [spoiled, good]):
        expire(engine, claimed)
    with engine.begin() as connection:
        assert sweep(connection) == {spoiled: "crashed", good: "crashed"}
    assert read(engine, spoiled).retry is None
    assert [one.job_id for one in claim(engine, [spoiled, good])] == [spoiled]


def test_copies_of_an_ended_job_have_its_policy(engine: Engine) -> None:
    (job_id,) = submit(engine, retry=RetryPolicy(max_attempts=1))
    crash(engine, attempt(engine, job_id))
    (other,) = submit(engine, retry=FIVE)
    change(engine, "UPDATE jobs SET state = 'cancelled', finished_at = now() WHERE fence = 0")
    with Client(database=engine) as client:
        assert client.get(client.replay(job_id)).retry == RetryPolicy(max_attempts=1)
        assert client.retry_where({"state": "cancelled"}) == 1
    copy = cell(engine, "SELECT id FROM jobs WHERE replay_of = :id", id=other)
    assert read(engine, copy).retry == FIVE


def test_python_schedules_and_children_pass_a_policy_on(engine: Engine) -> None:
    wanted = {"max_attempts": 7, "on": ["engine"]}
    with Client(database=engine) as client:
        one = client.submit(MODEL, "a", retry=wanted)
        many = client.submit_many([JobRequest(model=MODEL, prompt="a", retry=FIVE)], n=2)
        child = client.submit(MODEL, "{{a}}", depends_on=[{"job": one, "as": "a"}], retry=wanted)
    request = {"model": MODEL, "prompt": "a", "retry": wanted}
    schedule = NewSchedule(name="n", cron="* * * * *", request=request)
    with engine.begin() as connection:
        schedule_rows.create(connection, schedule)
    change(engine, "UPDATE schedules SET next_at = date_trunc('minute', now())")
    with engine.begin() as connection:
        assert due_schedules.fire_next(connection) is not None
    fired = cell(engine, "SELECT last_job_id FROM schedules")
    policy = RetryPolicy(max_attempts=7, on=("engine",))
    assert [read(engine, job_id).retry for job_id in (one, child, fired)] == [policy] * 3
    assert [read(engine, job_id).retry for job_id in many] == [FIVE] * 2
