"""A tenant's transaction has a row of `jobs` and stays open: heads and relays do their work on all
others, and wait for nobody."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError

from shardline.contract.job import JobState
from shardline.store import jobs
from shardline.store.connection.database import connect
from shardline.store.tenants import quotas
from shardline_server.store import (
    celery_tasks,
    claims,
    crashes,
    ends,
    leases,
    outbox,
    preparation,
    sweeps,
)
from shardline_server.store.celery_tasks import CeleryTask
from shardline_server.store.claims import ClaimedJob
from shardline_server.store.leases import Beat
from shardline_server.store.preparation import PreparedJob
from shardline_server.store.windows import WINDOW_MIN
from tests.integration.rows import (
    HEAD,
    LONG_S,
    MODEL,
    cell,
    change,
    claim,
    database_with_head,
    end,
    request,
    state,
    submit,
    success,
)

CANCEL = text("UPDATE jobs SET cancel_requested_at = now() WHERE id = ANY(:ids)")


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    with database_with_head(database_url) as engine:
        yield engine


@pytest.fixture
def impatient(database_url: str) -> Iterator[Engine]:
    """Whoever waits for a lock fails."""
    engine = connect(database_url, lock_timeout_s=0.001)
    yield engine
    engine.dispose()


@contextmanager
def locked(engine: Engine, *ids: UUID) -> Iterator[None]:
    """An open transaction has asked for cancels, and takes them back at last."""
    with engine.connect() as tenant:
        tenant.execute(CANCEL, {"ids": list(ids)})
        yield


def held(engine: Engine) -> tuple[ClaimedJob, ClaimedJob]:
    """Two running jobs."""
    free, taken = claim(engine, submit(engine, 2))
    return free, taken


def keys_of(*claimed: ClaimedJob) -> list[tuple[UUID, int]]:
    """Of these claims."""
    return [(one.job_id, one.fence) for one in claimed]


def test_a_heartbeat_renews_all_leases_but_of_a_locked_row(
    engine: Engine, impatient: Engine
) -> None:
    free, taken = held(engine)
    lease = "SELECT lease_until FROM jobs WHERE id = :id"
    before = cell(engine, lease, id=taken.job_id)
    beats = [Beat(job_id=one.job_id, fence=1, start=0, ids=(4,)) for one in (free, taken)]
    with locked(engine, taken.job_id), impatient.begin() as connection:
        replies = leases.heartbeat(connection, beats, lease_s=2 * LONG_S)
    assert [replies[key].renewed for key in keys_of(free, taken)] == [True, False]
    assert cell(engine, lease, id=free.job_id) > before == cell(engine, lease, id=taken.job_id)
    tokens = "SELECT tokens FROM attempts WHERE job_id = :id"
    assert [cell(engine, tokens, id=one.job_id) for one in (free, taken)] == [[4], []]
    with impatient.begin() as connection:
        replies = leases.heartbeat(connection, beats, lease_s=LONG_S)
    assert replies[taken.job_id, 1].renewed
    assert cell(engine, tokens, id=taken.job_id) == [4]


def test_a_locked_row_is_told_as_running_and_ends_later(engine: Engine, impatient: Engine) -> None:
    free, taken = held(engine)
    both = [success(free), success(taken)]
    with locked(engine, taken.job_id):
        assert end(impatient, *both) == {
            free.job_id: JobState.SUCCEEDED,
            taken.job_id: JobState.RUNNING,
        }
    assert end(impatient, *both) == dict.fromkeys((free.job_id, taken.job_id), JobState.SUCCEEDED)
    assert cell(engine, "SELECT count(*) FROM results") == 2


def test_claims_that_are_given_up_leave_a_locked_row(engine: Engine, impatient: Engine) -> None:
    for give_up in (ends.release_running, crashes.requeue_or_fail_held):
        free, taken = held(engine)
        with locked(engine, taken.job_id), impatient.begin() as connection:
            assert set(give_up(connection, keys_of(free, taken))) == {free.job_id}
        assert state(engine, taken.job_id) is JobState.RUNNING


def test_a_failed_attempt_of_a_locked_row_is_not_judged_yet(
    engine: Engine, impatient: Engine
) -> None:
    free, taken = held(engine)
    with locked(engine, taken.job_id), impatient.begin() as connection:
        judged = crashes.requeue_failed_held(connection, keys_of(free, taken))
    assert judged == {free.job_id: False}, "without a policy it is to end"


def test_a_parked_job_with_a_locked_row_does_not_begin(engine: Engine, impatient: Engine) -> None:
    free, taken = held(engine)
    with engine.begin() as connection:
        claims.park(connection, keys_of(free, taken))
    with locked(engine, taken.job_id), impatient.begin() as connection:
        assert claims.begin_held(connection, keys_of(free, taken)) == {free.job_id}


def test_a_locked_row_is_not_claimed_and_others_are(engine: Engine, impatient: Engine) -> None:
    free, taken = submit(engine, 2)
    with locked(engine, taken):
        assert [one.job_id for one in claim(impatient, [free, taken])] == [free]
        with impatient.begin() as connection:
            assert claims.held_up(connection, [free, taken], HEAD, exact_wait_s=1) == {taken}
        change(engine, "UPDATE pipelines SET kv_tokens = 1")
        with impatient.begin() as connection:
            unfit = claims.postpone_unfit(connection, [taken], HEAD, wait_s=1)
            outbox.unstamp(connection, [taken])
        assert unfit == set()


def test_what_was_prepared_is_marked_without_a_locked_row(
    engine: Engine, impatient: Engine
) -> None:
    with engine.begin() as connection:
        stored = jobs.insert_jobs(connection, [request()] * 2)
    free, taken = (one.job_id for one in stored)
    ready = [
        PreparedJob(id=job_id, model=MODEL, prompt_ids=(5,), max_tokens=4, seed=9)
        for job_id in (free, taken)
    ]
    with locked(engine, taken), impatient.begin() as connection:
        assert preparation.mark_if_unprepared(connection, ready) == 1
        assert preparation.fail_if_unprepared(connection, {taken: {"code": "invalid"}}) == []
    with (
        locked(engine, taken),
        pytest.raises(OperationalError, match="lock timeout"),
        impatient.begin() as connection,
    ):
        preparation.mark_if_unprepared(connection, ready, waits=True)
    with impatient.begin() as connection:
        assert preparation.mark_if_unprepared(connection, ready) == 1


def test_a_transaction_that_submits_keeps_no_limited_job_from_running(
    engine: Engine, impatient: Engine
) -> None:
    with engine.begin() as connection:
        quotas.set_quota(connection, "default", {"max_running": 1})
    ids = submit(engine, 2)
    with engine.connect() as tenant:
        tenant.execute(text("INSERT INTO jobs (model, prompt) VALUES ('m', 'text')"))
        assert len(claim(impatient, ids)) == 1


def test_a_transaction_that_submits_keeps_no_other_quota_from_being_folded(
    engine: Engine, impatient: Engine
) -> None:
    with engine.begin() as connection:
        quotas.set_quota(connection, "acme", {"max_queued": 9})
        quotas.set_quota(connection, "default", {"max_queued": 9})
        connection.execute(
            text("INSERT INTO quota_changes (quota_id, queued) SELECT id, 1 FROM quotas")
        )
    with engine.connect() as tenant:
        tenant.execute(text("INSERT INTO jobs (model, prompt) VALUES ('m', 'text')"))
        with impatient.begin() as connection:
            quotas.fold_quotas(connection)
            found = quotas.list_quotas(connection)
        assert [(one.tenant, one.queued) for one in found] == [("acme", 1), ("default", 0)]
    with impatient.begin() as connection:
        assert [one.queued for one in quotas.list_quotas(connection)] == [1, 1]


def test_a_task_of_a_locked_job_expires_later_and_others_at_once(
    engine: Engine, impatient: Engine
) -> None:
    taken, free, begun = submit(engine, 3)
    claim(engine, [begun])
    for number, job_id in enumerate((taken, free, begun)):
        task = CeleryTask(task_id=str(job_id), request="{}", expires_s=number - 9.0)
        with engine.begin() as connection:
            celery_tasks.store(connection, task, job_id=job_id)
    late = "SELECT array_agg(id) FROM jobs WHERE deadline_at <= now()"
    left = "SELECT count(*) FROM celery_tasks WHERE expires_at IS NOT NULL"
    with locked(engine, taken):
        with impatient.begin() as connection:
            assert celery_tasks.expire(connection, max_batch=1) == 1
        assert (cell(engine, late), cell(engine, left)) == ([free], 1)
    with impatient.begin() as connection:
        assert [celery_tasks.expire(connection) for _ in range(2)] == [1, 0]
    assert (set(cell(engine, late)), cell(engine, left)) == ({taken, free}, 0)


def test_locked_rows_past_their_deadlines_fill_no_batch_of_a_sweep(
    engine: Engine, impatient: Engine
) -> None:
    taken, free = submit(engine, 2)
    late = "UPDATE jobs SET deadline_at = now() - make_interval(secs => :late_s) WHERE id = :id"
    change(engine, late, late_s=9, id=taken)
    change(engine, late, late_s=1, id=free)
    with locked(engine, taken), impatient.begin() as connection:
        swept = sweeps.sweep_stopped_queued(connection, lambda _: "", max_batch=1)
        assert swept == {free: JobState.EXPIRED}
    with impatient.begin() as connection:
        swept = sweeps.sweep_stopped_queued(connection, lambda _: "", max_batch=1)
    assert swept == {taken: JobState.EXPIRED}


@pytest.fixture
def rival(engine: Engine) -> str:
    """Another tenant than the default one."""
    change(engine, "INSERT INTO tenants (id) VALUES ('rival')")
    return "rival"


def sent(engine: Engine, resend_s: float = LONG_S) -> list[UUID]:
    """In one turn of a relay."""
    with engine.begin() as connection:
        return [send.job_id for send in outbox.stamp_due(connection, resend_s=resend_s)]


def test_some_locked_rows_take_no_place_in_a_window(engine: Engine, impatient: Engine) -> None:
    ids = submit(engine, WINDOW_MIN + 8)
    with locked(engine, *ids[:8]):
        assert set(sent(impatient)) == set(ids[8:])
        assert sent(impatient) == []


def test_a_tenant_with_windows_of_locked_rows_keeps_no_other_from_being_sent(
    engine: Engine, impatient: Engine, rival: str
) -> None:
    taken, other = submit(engine, 3 * WINDOW_MIN), submit(engine, WINDOW_MIN - 1, tenant=rival)
    with locked(engine, *taken):
        assert set(sent(impatient)) == set(other)
        assert sent(impatient) == []
    assert sent(impatient) == taken[:1]


def test_rows_locked_once_they_were_sent_take_no_place_in_a_window(
    engine: Engine, impatient: Engine, rival: str
) -> None:
    taken = submit(engine, WINDOW_MIN)
    assert sent(engine) == taken
    other = submit(engine, tenant=rival)
    change(engine, "UPDATE jobs SET sent_at = now() - interval '1 minute' WHERE sent_at < now()")
    with locked(engine, *taken):
        assert sent(impatient, resend_s=100.0) == [], "they may be claimed soon"
        assert sent(impatient, resend_s=10.0) == other
    assert set(sent(impatient, resend_s=10.0)) == set(taken)
