"""Tasks of the Celery door on a real Postgres: who settles them and when. One test for each
condition."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from uuid import UUID, uuid4

import msgspec
import pytest
from sqlalchemy import Engine

from services.relay.celery.task_ends import task_value
from shardline.contract.chat import FunctionCall, ToolCall
from shardline.contract.job import JobState
from shardline.store import jobs
from shardline_server.store import celery_tasks
from shardline_server.store.celery_tasks import CeleryTask, EndedTask
from shardline_server.store.ends import End
from tests.integration.rows import (
    cell,
    change,
    claim,
    database_with_head,
    end,
    running,
    submit,
    success,
)

LEASE_S = 60.0


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    with database_with_head(database_url) as engine:
        yield engine


def keep(
    engine: Engine, task_id: str, job_id: UUID | None, *, expires_s: float | None = None
) -> bool:
    """Store a task; whether it had been revoked."""
    task = CeleryTask(task_id=task_id, request=f'{{"id": "{task_id}"}}', expires_s=expires_s)
    error = None if job_id is not None else {"code": "conflict", "problem": "it is taken"}
    with engine.begin() as connection:
        return celery_tasks.store(connection, task, job_id=job_id, error=error) is not None


def lend(engine: Engine, lease_s: float = LEASE_S) -> list[EndedTask]:
    with engine.begin() as connection:
        return celery_tasks.lend(connection, lease_s=lease_s)


def ids_of(lent: list[EndedTask]) -> list[str]:
    return [one.task_id for one in lent]


def test_a_task_is_due_when_its_job_ends_whoever_ends_it(engine: Engine) -> None:
    claimed = running(engine)
    (queued,) = submit(engine)
    for task_id, job_id in (("ran", claimed.job_id), ("also", claimed.job_id), ("waited", queued)):
        assert not keep(engine, task_id, job_id)
    assert lend(engine) == []
    end(engine, success(claimed))
    with engine.begin() as connection:
        jobs.request_cancel(connection, [queued])
    lent = {one.task_id: one for one in lend(engine)}
    assert lent.keys() == {"ran", "also", "waited"}
    assert (lent["ran"].state, lent["ran"].text, lent["ran"].token_ids) == (
        JobState.SUCCEEDED,
        "done",
        [7, 8],
    )
    assert (lent["waited"].state, lent["waited"].text) == (JobState.CANCELLED, None)


def test_the_value_of_a_chats_task_has_its_reasoning_and_calls(engine: Engine) -> None:
    claimed = running(engine)
    keep(engine, "chat", claimed.job_id)
    whole = success(claimed)
    assert whole.result is not None
    call = ToolCall(id="c1", function=FunctionCall(name="look", arguments="{}"))
    said = msgspec.structs.replace(whole.result, reasoning="Hm.", tool_calls=(call,))
    end(engine, replace(whole, result=said))

    (lent,) = lend(engine)

    value = task_value(lent)
    assert (value["text"], value["reasoning"]) == ("done", "Hm.")
    assert value["tool_calls"] == [msgspec.to_builtins(call)]


def test_a_task_of_a_job_that_has_ended_or_has_none_is_due_at_once(engine: Engine) -> None:
    claimed = running(engine)
    failure = {"code": "engine", "problem": "it broke"}
    end(
        engine,
        End(job_id=claimed.job_id, fence=claimed.fence, state=JobState.FAILED, error=failure),
    )
    keep(engine, "late", claimed.job_id)
    keep(engine, "refused", None)
    lent = {one.task_id: one for one in lend(engine)}
    assert lent["late"].error == failure
    assert (lent["refused"].state, (lent["refused"].error or {})["problem"]) == (
        JobState.FAILED,
        "it is taken",
    )


def test_a_job_that_ends_after_its_task_is_stored_leaves_the_task_due(engine: Engine) -> None:
    claimed = running(engine)
    with engine.begin() as connection:
        celery_tasks.store(connection, CeleryTask(task_id="t", request="{}"), job_id=claimed.job_id)
        assert end(engine, success(claimed)) == {claimed.job_id: JobState.RUNNING}
    end(engine, success(claimed))
    assert ids_of(lend(engine)) == ["t"]


def test_what_is_lent_is_due_again_only_after_the_lease_and_never_once_settled(
    engine: Engine,
) -> None:
    keep(engine, "a", None)
    keep(engine, "b", None)
    assert sorted(ids_of(lend(engine, lease_s=0.0))) == ["a", "b"]
    assert sorted(ids_of(lend(engine))) == ["a", "b"]
    assert lend(engine) == []
    with engine.begin() as connection:
        celery_tasks.settle(connection, ["a"])
        celery_tasks.put_off(connection, ["a", "b"], pause_s=0.0, num_failures=2)
    (again,) = lend(engine)
    assert (again.task_id, again.num_failures) == ("b", 2)


def test_a_task_that_comes_again_changes_nothing_until_it_is_settled(engine: Engine) -> None:
    claimed = running(engine)
    keep(engine, "t", claimed.job_id)
    keep(engine, "t", submit(engine)[0])
    end(engine, success(claimed))
    (lent,) = lend(engine)
    assert lent.job_id == claimed.job_id
    keep(engine, "t", claimed.job_id)
    assert lend(engine) == []


def test_a_settled_task_that_comes_again_is_due_without_its_followers(engine: Engine) -> None:
    claimed = running(engine)
    keep(engine, "t", claimed.job_id)
    end(engine, success(claimed))
    lend(engine)
    with engine.begin() as connection:
        celery_tasks.settle(connection, ["t"])
    linked = '{"id": "t", "door": "d", "callbacks": [1], "errbacks": [1], "chain": [1], "chord": 1}'
    with engine.begin() as connection:
        for job_id in (submit(engine)[0], claimed.job_id):
            task = CeleryTask(task_id="t", request=linked)
            assert celery_tasks.store(connection, task, job_id=job_id) is None
    (lent,) = lend(engine)
    assert (lent.job_id, lent.text) == (claimed.job_id, "done")
    assert json.loads(lent.request or "") == {"id": "t", "door": "d"}


def test_a_revoke_waits_for_its_task_and_finds_one_that_is_there(engine: Engine) -> None:
    here, there = submit(engine, 2)
    keep(engine, "here", here)
    with engine.begin() as connection:
        assert celery_tasks.revoke(connection, ["here", "coming", "never"]) == {"here": here}
        celery_tasks.forget_revokes(connection, ["here", "never"])
    assert keep(engine, "coming", there)
    assert not keep(engine, "never", there)
    assert cell(engine, "SELECT count(*) FROM celery_tasks") == 3


def test_a_revoke_and_its_task_at_once_never_miss_each_other(engine: Engine) -> None:
    for number in range(20):
        (job_id,) = submit(engine)
        barrier = threading.Barrier(2)

        def revoke(
            task_id: str = str(number), barrier: threading.Barrier = barrier
        ) -> dict[str, UUID]:
            barrier.wait()
            with engine.begin() as connection:
                return celery_tasks.revoke(connection, [task_id])

        def come(
            task_id: str = str(number), job_id: UUID = job_id, barrier: threading.Barrier = barrier
        ) -> bool:
            barrier.wait()
            return keep(engine, task_id, job_id)

        with ThreadPoolExecutor(2) as pool:
            revoking = pool.submit(revoke)
            coming = pool.submit(come)
            assert bool(revoking.result()) != coming.result()


def test_jobs_that_did_not_begin_in_time_get_a_deadline_and_others_none(engine: Engine) -> None:
    began, waits, early = submit(engine, 3)
    for job_id, expires_s in ((began, 0.0), (waits, 0.0), (early, 100.0)):
        keep(engine, str(job_id), job_id, expires_s=expires_s)
    claim(engine, [began])
    with engine.begin() as connection:
        assert celery_tasks.expire(connection) == 2
    with engine.begin() as connection:
        assert celery_tasks.expire(connection) == 0
    assert cell(engine, "SELECT id FROM jobs WHERE deadline_at <= now()") == waits


def test_only_jobs_with_tasks_are_told_by_relays(engine: Engine) -> None:
    with_task, without = submit(engine, 2)
    keep(engine, "t", with_task)
    with engine.begin() as connection:
        assert celery_tasks.with_tasks(connection, [with_task, without, uuid4()]) == {with_task}


def test_tasks_without_a_job_are_forgotten_after_a_day_and_others_with_their_jobs(
    engine: Engine,
) -> None:
    (job_id,) = submit(engine)
    keep(engine, "kept", job_id)
    with engine.begin() as connection:
        celery_tasks.revoke(connection, ["never came", "newer"])
    change(
        engine,
        "UPDATE celery_tasks SET created_at = now() - interval '2 days' WHERE task_id <> 'newer'",
    )
    with engine.begin() as connection:
        assert celery_tasks.forget(connection) == 1
    assert cell(engine, "SELECT count(*) FROM celery_tasks") == 2
    change(engine, "DELETE FROM jobs")
    assert cell(engine, "SELECT task_id FROM celery_tasks") == "newer"
