"""The relay as a process: the Celery and Redis doors, plain SQL, revoke. Real Postgres, Valkey and
Celery."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery.exceptions import TaskRevokedError
from sqlalchemy import text

from shardline.contract.job import MAX_METADATA_BYTES, JobState
from shardline.contract.keys import INTAKE, INTAKE_DEAD, INTAKE_GROUP
from shardline.contract.queues import INTAKE_QUEUE
from shardline.contract.retry_policy import RetryPolicy
from shardline.store import pipelines
from shardline.store.tenants import quotas
from tests.integration.relay.relay_stack import PATIENCE_S, RelayStack, relay_stack
from tests.integration.rows import MODEL, cell, change
from tests.polling import until


@pytest.fixture
def here(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[RelayStack]:
    """Servers with one relay."""
    with relay_stack(database_url, redis_url, tmp_path) as here:
        here.start_relay()
        yield here


def test_a_row_inserted_by_sql_is_tokenized_and_its_id_sent_by_celery(here: RelayStack) -> None:
    change(here.engine, "INSERT INTO jobs (model, prompt) VALUES ('m', 'one two')")
    (sent,) = here.take_messages(1)
    job = here.job(sent)
    assert job is not None
    assert job.prompt_token_ids == (2, 3)
    assert here.claim(sent)


def test_invalid_rows_inserted_by_hand_fail_with_a_reason_and_block_nothing(
    here: RelayStack,
) -> None:
    with here.engine.begin() as connection:
        for columns, values in [
            ("model, prompt", "'nobody', 'one'"),
            ("model, prompt", "'m', ''"),
            ("model, prompt, params", """'m', 'one', '{"top_p": 7}'"""),
            ("model, prompt, params", """'m', 'one', '{"typo": 7}'"""),
            ("model, messages", """'m', '[{"role": 1}]'"""),
            ("model, messages", """'m', '[{"role": "user", "content": "one"}]'"""),
            ("model, prompt_ids", "'m', '{1,NULL}'"),
            ("model, prompt_ids", "'m', '{1000}'"),
            ("model, prompt, params", """'m', 'one', '{"max_tokens": 32}'"""),
        ]:
            connection.execute(text(f"INSERT INTO jobs ({columns}) VALUES ({values})"))
        good = connection.execute(
            text(
                "INSERT INTO jobs (model, prompt, params)"
                """ VALUES ('m', 'one', '{"seed": 5}') RETURNING id"""
            )
        ).scalar_one()
    assert here.take_messages(1) == [str(good)]
    assert (job := here.job(good)) is not None
    assert job.seed == 5
    until(lambda: cell(here.engine, "SELECT count(*) FROM jobs WHERE state = 'failed'") == 9)
    with here.engine.begin() as connection:
        fields = set(
            connection.scalars(text("SELECT error->>'field' FROM jobs WHERE state = 'failed'"))
        )
    assert fields == {
        *("model", "prompt", "top_p", "typo", "max_tokens"),
        *("messages[0].role", "messages", "prompt[1]", "prompt[0]"),
    }


def test_a_pipelines_kv_below_the_context_limits_a_prepared_row(here: RelayStack) -> None:
    with here.engine.begin() as connection:
        pipelines.ready(connection, "p", 1, seats=4, stages=[], exact=True, kv_tokens=16)
    change(here.engine, "INSERT INTO jobs (model, prompt) VALUES ('m', 'one two')")

    (sent,) = here.take_messages(1)

    assert cell(here.engine, "SELECT max_tokens FROM jobs WHERE id = :id", id=sent) == 14


def test_a_celery_task_of_another_service_becomes_the_job_of_its_id(here: RelayStack) -> None:
    task_id = here.submit(
        {"model": MODEL, "prompt": "one", "metadata": {"a": 1}}, task_id=str(uuid4())
    )
    assert here.take_messages(1) == [task_id]
    assert (job := here.job(task_id)) is not None
    assert job.metadata == {"a": 1}


def test_an_invalid_celery_task_becomes_a_failed_row_or_a_dead_letter(here: RelayStack) -> None:
    bad = here.submit({"model": MODEL, "prompt": "one", "top_p": 9})
    lost = here.submit({"prompt": "one"})
    job = here.wait_for_end(bad)
    assert (job.state, (job.error or {})["field"]) == (JobState.FAILED, "top_p")
    ((_, dead),) = until(here.dead_letters)
    assert dead[b"entry"] == lost.encode()
    assert json.loads(dead[b"reason"])["field"] == "model"


def test_a_repeated_celery_task_is_one_row_and_a_changed_one_is_refused(here: RelayStack) -> None:
    task_id = str(uuid4())
    for prompt in ("one", "one", "two"):
        here.submit({"model": MODEL, "prompt": prompt}, task_id=task_id)
    assert until(lambda: here.redis.xlen(INTAKE_DEAD)) == 1
    assert cell(here.engine, "SELECT prompt FROM jobs") == "one"


def test_each_intake_entry_ends_as_a_row_or_a_dead_letter(here: RelayStack) -> None:
    job_id = str(uuid4())
    for request in [
        {"model": MODEL, "prompt": "one", "id": job_id},
        {"model": MODEL, "prompt": "one", "id": job_id},
        {"model": MODEL, "prompt": ""},
        {"model": MODEL, "prompt": "one", "tenant": "nobody"},
        {"model": MODEL, "prompt": "a\0"},
        {"model": MODEL, "prompt": "one", "metadata": {"a": "x" * MAX_METADATA_BYTES}},
    ]:
        here.redis.xadd(INTAKE, {"request": json.dumps(request)})
    here.redis.xadd(INTAKE, {"request": "no json {"})
    here.redis.xadd(INTAKE, {"another": "field"})
    here.redis.xadd(INTAKE, {"request": json.dumps({"model": MODEL, "prompt": "two"})})
    assert set(here.take_messages(2)) >= {job_id}
    until(lambda: here.redis.xlen(INTAKE) == 0)
    assert here.redis.xlen(INTAKE_DEAD) == 2
    assert cell(here.engine, "SELECT count(*) FROM jobs WHERE state = 'failed'") == 4
    assert cell(here.engine, "SELECT count(*) FROM jobs") == 6
    assert cell(here.engine, "SELECT max(length(metadata::text)) FROM jobs") == len("{}")


@pytest.mark.parametrize("door", ["celery", "redis"])
def test_a_request_over_a_quota_ends_failed_with_the_limit(here: RelayStack, door: str) -> None:
    with here.engine.begin() as connection:
        quotas.set_quota(connection, "acme", {"max_queued": 1})

    for _ in range(2):
        request = {"model": MODEL, "prompt": "one", "tenant": "acme", "id": str(uuid4())}
        if door == "celery":
            here.submit(request)
        else:
            here.redis.xadd(INTAKE, {"request": json.dumps(request)})
        here.wait_for(request["id"], lambda job: job)

    refused = here.wait_for_end(request["id"])
    assert (refused.state, refused.tenant) == (JobState.FAILED, "acme")
    assert refused.error is not None
    assert (refused.error["code"], refused.error["field"]) == ("limit_exceeded", "max_queued")
    assert here.redis.xlen(INTAKE_DEAD) == 0
    with here.engine.begin() as connection:
        assert [each.queued for each in quotas.list_quotas(connection) if each.queued] == [1]


@pytest.mark.parametrize("door", ["celery", "redis", "sql"])
def test_a_policy_comes_with_its_job_and_a_wrong_one_fails_it_by_name(
    here: RelayStack, door: str
) -> None:
    policies: list[dict[str, Any]] = [{"max_attempts": 5, "on": ["engine"]}, {"max_attempts": 99}]
    ids = [str(uuid4()) for _ in policies]
    for job_id, retry in zip(ids, policies, strict=True):
        request = {"model": MODEL, "prompt": "one", "id": job_id, "retry": retry}
        if door == "celery":
            here.submit(request)
        elif door == "redis":
            here.redis.xadd(INTAKE, {"request": json.dumps(request)})
        else:
            statement = "INSERT INTO jobs (id, model, prompt, retry) VALUES (:id, 'm', 'one', :it)"
            change(here.engine, statement, id=job_id, it=json.dumps(retry))
    assert here.take_messages(1) == ids[:1]
    assert (job := here.job(ids[0])) is not None
    assert job.retry == RetryPolicy(max_attempts=5, on=("engine",))
    refused = here.wait_for_end(ids[1])
    error = refused.error or {}
    assert (refused.state, error["field"]) == (JobState.FAILED, "retry.max_attempts")
    assert ("<= 32" in error["problem"], bool(error["remedy"])) == (True, True)


def test_a_lost_consumer_group_is_made_again(here: RelayStack) -> None:
    until(lambda: here.redis.exists(INTAKE))
    here.redis.xgroup_destroy(INTAKE, INTAKE_GROUP)
    here.redis.xadd(INTAKE, {"request": json.dumps({"model": MODEL, "prompt": "one"})})
    assert len(here.take_messages(1)) == 1


def test_revoking_a_queued_job_cancels_its_row(here: RelayStack) -> None:
    task_id = here.submit({"model": MODEL, "prompt": "one"})
    here.take_messages(1)
    (reply,) = here.app.control.revoke(task_id, reply=True)
    assert "1 jobs" in str(reply)
    assert here.wait_for_end(task_id).state is JobState.CANCELLED


def test_only_terminate_ends_a_running_job(here: RelayStack) -> None:
    task_id = here.submit({"model": MODEL, "prompt": "one"})
    here.take_messages(1)
    assert here.claim(task_id)
    here.app.control.revoke(task_id, reply=True)
    other = here.submit({"model": MODEL, "prompt": "two"})
    here.take_messages(1)
    here.app.control.revoke(other, reply=True)
    here.wait_for_end(other)
    assert (job := here.job(task_id)) is not None
    assert not job.cancel_requested
    here.app.control.terminate(task_id, reply=True)
    assert here.wait_for(task_id, lambda job: job.cancel_requested).state is JobState.RUNNING


def test_a_revoke_before_its_request_cancels_the_later_row(here: RelayStack) -> None:
    task_id = str(uuid4())
    here.app.control.revoke(task_id, reply=True)
    here.submit({"model": MODEL, "prompt": "one"}, task_id=task_id)
    assert here.wait_for_end(task_id).state is JobState.CANCELLED


def test_a_broadcast_for_another_apps_queue_is_refused(here: RelayStack) -> None:
    (answer,) = here.app.control.add_consumer("emails", reply=True)
    assert "no consumer of 'emails'" in str(answer)
    found = here.app.control.inspect().active_queues()
    assert [queue["name"] for queues in found.values() for queue in queues] == [INTAKE_QUEUE]


def test_a_relays_pool_keeps_its_size_and_says_so(here: RelayStack) -> None:
    for command in (here.app.control.pool_grow, here.app.control.pool_shrink):
        assert "set SHARDLINE_CONCURRENCY" in str(command(2, reply=True))
    task_id = here.submit({"model": MODEL, "prompt": "one"})
    assert here.take_messages(1) == [task_id]


def test_an_answer_to_a_dead_caller_does_not_stay_in_redis(here: RelayStack) -> None:
    with here.app.connection_for_write() as connection:
        mailbox = here.app.control.mailbox(connection)
        # What `celery inspect ping` does, up to where it would wait.
        mailbox._publish("ping", {}, reply_ticket=str(uuid4()), timeout=PATIENCE_S)
        answer = f"{mailbox.oid}.reply.celery.pidbox"
        until(lambda: here.redis.exists(answer))
        until(lambda: here.redis.pttl(answer) > 0)


def test_a_celery_submission_publishes_no_event_and_no_result_of_its_id(here: RelayStack) -> None:
    seen: list[dict[str, object]] = []
    with here.app.connection_for_read() as connection:
        receiver = here.app.events.Receiver(connection, handlers={"*": seen.append})
        capture = receiver.itercapture(limit=None, timeout=60, wakeup=True)
        next(capture)
        task_id = here.submit({"model": MODEL, "prompt": "one"})
        here.take_messages(1)
        # A heartbeat after the submission: what was sent before it has arrived.
        num_before = len(seen)
        while len(seen) == num_before or seen[-1]["type"] != "worker-heartbeat":
            next(capture)
    assert not [event for event in seen if event.get("uuid") == task_id]
    assert here.app.AsyncResult(task_id).state == "PENDING"


def test_the_producer_of_a_job_that_ends_without_a_head_gets_a_result(here: RelayStack) -> None:
    bad_request = here.submit({"model": MODEL, "prompt": "one", "top_p": 9})
    bad_model = here.submit({"model": "nobody", "prompt": "one"})
    no_row = here.submit({"prompt": "one"})
    late = here.submit({"model": MODEL, "prompt": "one", "deadline_s": 0.01, "delay_s": 100})
    revoked = here.submit({"model": MODEL, "prompt": "one", "delay_s": 100})
    here.wait_for(revoked, lambda job: job.state is JobState.QUEUED)
    here.app.control.revoke(revoked)
    for task_id, word in [(bad_request, "top_p"), (bad_model, "nobody"), (no_row, "model")]:
        with pytest.raises(Exception, match=word) as caught:
            here.app.AsyncResult(task_id).get(timeout=PATIENCE_S)
        assert type(caught.value).__name__ == "JobFailed"
    for task_id, word in [(late, "expired"), (revoked, "cancelled")]:
        with pytest.raises(TaskRevokedError, match=word):
            here.app.AsyncResult(task_id).get(timeout=PATIENCE_S)
    # An invalid request under the id of a job that lives must not end it for its producer.
    alive = here.submit({"model": MODEL, "prompt": "one", "delay_s": 100})
    here.submit({"model": MODEL, "prompt": ""}, task_id=alive)
    until(lambda: len(here.dead_letters()) == 2)
    assert here.app.AsyncResult(alive).state == "PENDING"
