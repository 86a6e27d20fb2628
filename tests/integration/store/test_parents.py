"""Jobs that wait for others: accepted at once, released once, whatever ends meanwhile."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from shardline.base.errors import Conflict, Invalid, LimitExceeded
from shardline.client import Client
from shardline.contract.ids import new_id
from shardline.contract.job import JobState
from shardline.contract.parents.parent_job import ParentJob
from shardline.store import dead_letters, jobs
from shardline.store.statistics.demand import demand
from shardline.store.statistics.server_state import unsent_models
from shardline.store.tenants import quotas
from shardline_server.store import parents, preparation, retention, sweeps
from tests.integration.rows import (
    LONG_S,
    MODEL,
    cell,
    change,
    end,
    request,
    running,
    state,
    submit,
    success,
)


def child_of(engine: Engine, *ids: UUID, **fields: Any) -> UUID:
    """Accepted, as a door commits it."""
    waited = tuple(ParentJob(job=one) for one in ids)
    with engine.begin() as connection:
        (stored,) = jobs.insert_jobs(connection, [request(depends_on=waited, **fields)])
    return stored.job_id


def look(engine: Engine) -> None:
    """As a relay does in its turn."""
    with engine.begin() as connection:
        assert parents.release(connection) is False


def takes(engine: Engine) -> set[UUID]:
    """What a relay may prepare now."""
    with engine.connect() as connection, connection.begin() as transaction:
        found = preparation.take_unprepared(connection, lease_s=LONG_S)
        transaction.rollback()
    return {row.id for row in found}


def waits_for(engine: Engine, job_id: UUID) -> set[UUID]:
    with engine.begin() as connection:
        job = jobs.get_job(connection, job_id)
    assert job is not None
    return set(job.waits_for)


def test_a_job_is_released_by_the_last_of_ten_parents(engine: Engine) -> None:
    claimed = [running(engine) for _ in range(10)]
    ids = [one.job_id for one in claimed]
    child = child_of(engine, *ids)
    # Also before a relay has looked for the first time.
    end(engine, success(claimed[0]))
    for number, one in enumerate(claimed[1:], 1):
        look(engine)
        assert takes(engine) == set()
        assert waits_for(engine, child) == set(ids[number:])
        end(engine, success(one))
    look(engine)

    assert takes(engine) == {child}
    assert waits_for(engine, child) == set()
    look(engine)
    assert takes(engine) == {child}


def test_an_end_that_commits_between_the_insert_and_the_look_is_not_missed(engine: Engine) -> None:
    claimed = running(engine)
    ending = engine.connect()
    transaction = ending.begin()
    # Its trigger sees no child yet.
    ending.execute(
        text(
            "UPDATE jobs SET state = 'succeeded', finished_at = now(), lease_until = NULL"
            " WHERE id = :id"
        ),
        {"id": claimed.job_id},
    )
    child = child_of(engine, claimed.job_id)
    look(engine)
    assert takes(engine) == set()
    assert cell(engine, "SELECT state FROM parents_of_jobs") == "due", "not taken for open"
    transaction.commit()
    ending.close()
    look(engine)

    assert takes(engine) == {child}


def test_an_end_comes_after_the_look_and_then_tells_of_itself(engine: Engine) -> None:
    claimed = running(engine)
    child = child_of(engine, claimed.job_id)
    with engine.begin() as connection:
        parents.release(connection)
        assert end(engine, success(claimed)) == {claimed.job_id: JobState.RUNNING}
    assert end(engine, success(claimed)) == {claimed.job_id: JobState.SUCCEEDED}
    assert takes(engine) == set()
    look(engine)

    assert takes(engine) == {child}


def test_of_two_relays_that_look_at_once_one_looks(engine: Engine) -> None:
    ended = [running(engine), running(engine)]
    child = child_of(engine, *(one.job_id for one in ended))
    end(engine, *map(success, ended))
    with engine.begin() as first, engine.begin() as second:
        first.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": parents.LOCK})
        assert parents.release(second) is False
    assert takes(engine) == set()
    look(engine)

    assert takes(engine) == {child}


@pytest.mark.parametrize("how", ["failed", "cancelled", "deleted"])
def test_a_parent_that_does_not_succeed_releases_at_once(engine: Engine, how: str) -> None:
    other, bad = running(engine), submit(engine)[0]
    strict = child_of(engine, other.job_id, bad)
    patient = child_of(engine, other.job_id, bad, on_parent_failure="run")
    look(engine)
    if how == "deleted":
        change(engine, "DELETE FROM jobs WHERE id = :id", id=bad)
    elif how == "failed":
        change(
            engine,
            "UPDATE jobs SET state = 'failed', finished_at = now(), error = '{}' WHERE id = :id",
            id=bad,
        )
    else:
        with engine.begin() as connection:
            jobs.request_cancel(connection, [bad])
    look(engine)

    assert takes(engine) == {strict}
    with engine.begin() as connection:
        error = parents.failure(connection, strict)
        assert error is not None
        assert (error["code"], error["parent"]) == ("parent_failed", str(bad))
        assert how in error["problem"]
        assert parents.failure(connection, patient) is None
    end(engine, success(other))
    look(engine)
    assert takes(engine) == {strict, patient}


def test_a_waiting_job_is_cancelled_and_expires_and_its_own_children_hear_of_it(
    engine: Engine,
) -> None:
    (parent,) = submit(engine)
    cancelled = child_of(engine, parent)
    late = child_of(engine, parent, deadline_s=LONG_S)
    grandchild = child_of(engine, cancelled)
    look(engine)
    with engine.begin() as connection:
        assert jobs.request_cancel(connection, [cancelled]) == {cancelled: JobState.CANCELLED}
        connection.execute(text("UPDATE jobs SET deadline_at = now() WHERE id = :id"), {"id": late})
    with engine.begin() as connection:
        ended = sweeps.sweep_stopped_queued(connection, lambda _: "")
    assert ended == {late: JobState.EXPIRED}
    look(engine)

    assert takes(engine) == {grandchild}


def test_parents_are_jobs_of_the_same_tenant(engine: Engine) -> None:
    change(engine, "INSERT INTO tenants (id) VALUES ('other')")
    (foreign,) = submit(engine, tenant="other")
    for wrong in (foreign, new_id()):
        with pytest.raises(Invalid, match=f"tenant default has no job {wrong}"):
            child_of(engine, wrong)
    own = new_id()
    with pytest.raises(Invalid, match=f"no job {own}"):
        child_of(engine, own, id=own)
    assert cell(engine, "SELECT count(*) FROM jobs") == 1


def test_one_call_stores_parents_and_children(engine: Engine, database_url: str) -> None:
    first, second, third = new_id(), new_id(), new_id()
    chain = [
        {"model": MODEL, "prompt": "a", "id": first, "idempotency_key": "z"},
        {"model": MODEL, "prompt": "{{a}}", "id": second, "idempotency_key": "y"},
        {"model": MODEL, "prompt": "{{b}}", "id": third},
    ]
    chain[1]["depends_on"] = [{"job": first, "as": "a"}]
    chain[2]["depends_on"] = [{"job": str(second), "as": "b"}]
    with Client(database_url=database_url) as client:
        assert client.submit_many(chain) == [first, second, third]
        assert client.submit_many(chain) == [first, second, third], "a repeat"
        assert client.get(third).waits_for == (second,)
        assert client.get(third).depends_on == ({"job": str(second), "as": "b"},)
        assert {one.id for one in client.list() if one.waits_for_parents} == {second, third}
        with pytest.raises(Conflict, match="another depends_on"):
            client.submit_many(
                [
                    {
                        **chain[1],
                        "prompt": "{{a}}",
                        "depends_on": [{"job": first, "as": "a"}, {"job": first}],
                    }
                ]
            )
        wrong = {"model": MODEL, "prompt": "c", "depends_on": [{"job": new_id()}]}
        good = {"model": MODEL, "prompt": "d"}
        outcomes = client.submit_many([good, wrong], on_error="skip")
    assert isinstance(outcomes[0], UUID)
    assert isinstance(outcomes[1], Invalid)


@pytest.mark.parametrize("n", [1, 2])
def test_a_child_of_a_request_that_a_quota_refuses_is_refused_for_that(
    engine: Engine, database_url: str, n: int
) -> None:
    with engine.begin() as connection:
        quotas.set_quota(connection, "acme", {"max_queued": 0})
    first, second, third = new_id(), new_id(), new_id()
    of_default: dict[str, Any] = {"model": MODEL, "prompt": "a", "tenant": "default"}
    asked: list[dict[str, Any]] = [
        {"model": MODEL, "prompt": "a", "id": first, "tenant": "acme"},
        {**of_default, "id": second, "depends_on": [{"job": first}]},
        {**of_default, "id": third, "depends_on": [{"job": second}]},
        of_default,
        {**of_default, "depends_on": [{"job": new_id()}]},
    ]
    with Client(database_url=database_url) as client:
        for requests in (asked[:2], asked[:4]):
            with pytest.raises(LimitExceeded) as raised:
                client.submit_many(requests, n=n)
            assert raised.value.field == "max_queued"
        for requests in (asked[:4], asked):
            parent, child, grandchild, other, *orphans = client.submit_many(
                requests, n=n, on_error="skip"
            )[::n]
            assert isinstance(other, UUID)
            for refused in (parent, child, grandchild):
                assert isinstance(refused, LimitExceeded)
            assert all(isinstance(one, Invalid) and one.field == "depends_on" for one in orphans)
    assert cell(engine, "SELECT count(*) FROM jobs") == 2 * n


def test_a_statement_with_a_circle_is_refused(engine: Engine) -> None:
    insert = text(
        "INSERT INTO jobs (id, model, prompt, depends_on) VALUES"
        " (:a, 'm', 'a', jsonb_build_array(jsonb_build_object('job', CAST(:b AS text)))),"
        " (:b, 'm', 'b', jsonb_build_array(jsonb_build_object('job', CAST(:a AS text))))"
    )
    with pytest.raises(Exception, match="waits too, and comes behind it"), engine.begin() as one:
        one.execute(insert, {"a": new_id(), "b": new_id()})


def test_what_waits_is_no_queue_that_heads_leave_alone(engine: Engine) -> None:
    (parent,) = submit(engine)
    child_of(engine, parent)
    look(engine)
    change(
        engine,
        "UPDATE jobs SET created_at = now() - interval '1 h', sent_at = now()"
        " WHERE depends_on IS NULL",
    )
    change(engine, "UPDATE jobs SET created_at = now() - interval '1 h'")
    with engine.begin() as connection:
        assert sweeps.count_active(connection) == {(MODEL, "queued"): 1, (MODEL, "waiting"): 1}
        assert unsent_models(connection, late_s=30) == []
        assert demand(connection, MODEL, 2 * LONG_S).num_queued == 1


def test_a_parent_is_kept_until_its_child_has_its_text(engine: Engine) -> None:
    claimed, other = running(engine), running(engine)
    child = child_of(engine, claimed.job_id, other.job_id)
    end(engine, success(claimed))
    look(engine)
    old = (
        "UPDATE jobs SET created_at = now() - interval '2 d', finished_at = now() - interval '1 d'"
    )
    change(engine, f"{old} WHERE id = :id", id=claimed.job_id)
    for num_deleted in (0, 1):
        with engine.begin() as connection:
            assert retention.delete_old(connection, age_s=LONG_S).num_deleted == num_deleted
            jobs.request_cancel(connection, [child])


def test_a_replay_has_the_same_parents(engine: Engine) -> None:
    (parent,) = submit(engine)
    child = child_of(engine, parent)
    change(
        engine,
        "UPDATE jobs SET state = 'failed', finished_at = now(), error = '{\"code\": \"crashed\"}'"
        " WHERE id = :id",
        id=child,
    )
    with engine.begin() as connection:
        again = dead_letters.replay(connection, child)
    assert waits_for(engine, again) == {parent}
    change(engine, "DELETE FROM jobs WHERE id = :id", id=parent)
    with pytest.raises(Invalid, match="has no job"), engine.begin() as connection:
        dead_letters.replay(connection, child)
    assert state(engine, child) is JobState.FAILED


def test_a_quota_reserves_all_that_fits_until_the_texts_are_known(engine: Engine) -> None:
    change(engine, "INSERT INTO quotas (tenant_id, budget_tokens) VALUES ('default', 1000)")
    (parent,) = submit(engine)
    child = child_of(engine, parent)
    reserved = "SELECT tokens FROM reservations WHERE job_id = :id"
    assert cell(engine, reserved, id=parent) == 10
    assert cell(engine, reserved, id=child) == 32, "the context of the model"
    with engine.begin() as connection:
        jobs.request_cancel(connection, [child])
    assert cell(engine, "SELECT count(*) FROM reservations") == 1
