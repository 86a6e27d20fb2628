"""A tenant's own door by Celery and by Redis: what its user of Redis may do, and whose its requests
are, whatever they say. Real Valkey, Postgres, Celery and relay."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from celery.exceptions import TimeoutError as ResultTimeout
from kombu.utils.json import loads
from redis import Redis
from redis.exceptions import AuthenticationError, NoPermissionError
from sqlalchemy import text

from shardline.contract.ids import derived_id
from shardline.contract.job import Job, JobState
from shardline.contract.keys import INTAKE, INTAKE_GROUP, RELAY_UNACKED, job_stream
from shardline.contract.queues import INTAKE_QUEUE, generate_queue
from shardline.contract.tenants.tenant_door import TenantDoor
from shardline.store.tenants import quotas
from shardline_server.failpoints import Point
from tests.chaos.faults.arming import arm
from tests.integration.relay.door_tenant import DoorTenant, door_tenant, shardline
from tests.integration.relay.foreign_app import CALLS
from tests.integration.relay.relay_stack import PATIENCE_S, RelayStack, relay_stack
from tests.integration.rows import MODEL, cell, claim_one, end_one, success
from tests.polling import until

BOB = TenantDoor.of("bob")

FORBIDDEN: dict[str, tuple[Any, ...]] = {
    "push to the default queue": ("LPUSH", INTAKE_QUEUE, "x"),
    "push to another tenant's queue": ("LPUSH", BOB.tasks, "x"),
    "push to another's urgent queue": ("LPUSH", f"{BOB.tasks}\x06\x163", "x"),
    "push to a model's queue": ("LPUSH", generate_queue(MODEL), "x"),
    "add to the default stream": ("XADD", INTAKE, "*", "request", "{}"),
    "add to another tenant's stream": ("XADD", BOB.requests, "*", "request", "{}"),
    "put a list in place of its stream": ("LPUSH", "shardline:door:acme:requests", "x"),
    "put a stream in place of its queue": ("XADD", "shardline:door:acme:tasks", "*", "a", "b"),
    "read another tenant's stream": ("XRANGE", BOB.requests, "-", "+"),
    "read another tenant's queue": ("LRANGE", BOB.tasks, "0", "-1"),
    "read another tenant's result": ("GET", f"{BOB.results}celery-task-meta-order-17"),
    "read a result of the default tenant": ("GET", "celery-task-meta-order-17"),
    "delete another tenant's result": ("DEL", f"{BOB.results}celery-task-meta-order-17"),
    "write a result": ("SET", "shardline:door:acme:results:celery-task-meta-1", "x"),
    "hear of another tenant's results": ("SUBSCRIBE", f"{BOB.results}celery-task-meta-1"),
    "hear of all results": ("PSUBSCRIBE", "*"),
    "command workers": ("PUBLISH", "/0.celery.pidbox", "x"),
    "follow tokens": ("XREAD", "STREAMS", job_stream(uuid4()), "0"),
    "take requests": ("XREADGROUP", "GROUP", INTAKE_GROUP, "me", "STREAMS", INTAKE, ">"),
    "take messages": ("RPOP", "shardline:door:acme:tasks"),
    "see unacknowledged messages": ("HGETALL", RELAY_UNACKED),
    "run scripts": ("EVAL", "return 1", "0"),
    "list keys": ("KEYS", "*"),
    "empty it": ("FLUSHALL",),
    "give itself rights": ("ACL", "SETUSER", "acme_app", "allcommands", "allkeys"),
}


@pytest.fixture
def here(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[RelayStack]:
    """Servers without a relay."""
    (tmp_path / "failpoints").mkdir()
    with relay_stack(database_url, redis_url, tmp_path) as here:
        here.variables |= {"SHARDLINE_FAILPOINTS": str(tmp_path / "failpoints")}
        yield here


@pytest.fixture
def acme(here: RelayStack) -> Iterator[DoorTenant]:
    with door_tenant(here.database_url, here.redis_url, "acme") as tenant:
        yield tenant


@pytest.fixture
def bob(here: RelayStack) -> Iterator[DoorTenant]:
    with door_tenant(here.database_url, here.redis_url, "bob") as tenant:
        yield tenant


def job_of(here: RelayStack, prompt: str) -> Job:
    """The one job with this prompt, once it is there."""

    def found() -> Any:
        with here.engine.begin() as connection:
            query = text("SELECT id FROM jobs WHERE prompt = :prompt")
            return connection.scalars(query, {"prompt": prompt}).all()

    (job_id,) = until(found, timeout_s=PATIENCE_S)
    job = here.job(job_id)
    assert job is not None
    return job


def complete(here: RelayStack, job_id: UUID) -> None:
    here.wait_for(job_id, lambda job: job.state is JobState.QUEUED)
    until(lambda: cell(here.engine, "SELECT prepared_at FROM jobs WHERE id = :id", id=job_id))
    claimed = claim_one(here.engine, job_id)
    end_one(here.engine, success(claimed))


def forge(tenant: DoorTenant, change: Callable[[dict[str, Any]], None], **fields: Any) -> str:
    """Sends a message with what its sender makes of it; returns its id."""
    task_id = str(uuid4())
    key = tenant.door.tasks
    sent: list[str] = []

    with tenant.app.connection_for_write() as connection:
        channel = connection.default_channel
        channel._put = lambda _, message, **__: sent.append(json.dumps(message))
        with tenant.app.amqp.Producer(connection) as producer:
            tenant.app.send_task(
                "shardline.submit", kwargs=fields, task_id=task_id, queue=key, producer=producer
            )
    envelope = json.loads(sent[0])
    change(envelope)
    tenant.redis.lpush(key, json.dumps(envelope))
    return task_id


def failure(tenant: DoorTenant, task_id: str) -> str:
    """What its sender is told."""
    result = tenant.app.AsyncResult(task_id)
    with pytest.raises(Exception, match=r".") as caught:
        result.get(timeout=PATIENCE_S)
    assert not isinstance(caught.value, ResultTimeout)
    return str(caught.value)


@pytest.mark.parametrize("act", FORBIDDEN)
def test_a_tenants_user_may_do_nothing_else(acme: DoorTenant, act: str) -> None:
    with pytest.raises(NoPermissionError):
        acme.redis.execute_command(*FORBIDDEN[act])


def test_no_user_and_a_wrong_password_come_not_in(acme: DoorTenant) -> None:
    host = acme.url.rpartition("@")[2]
    for login in ("", f"{acme.user}:wrong@", f"nobody{acme.user}:wrong@"):
        with (
            Redis.from_url(f"redis://{login}{host}") as redis,
            pytest.raises(AuthenticationError),
        ):
            redis.xadd(acme.door.requests, {"request": "{}"})


def test_tenants_with_one_task_id_have_each_its_own_job_and_result(
    here: RelayStack, acme: DoorTenant, bob: DoorTenant
) -> None:
    here.start_relay()
    here.submit({"model": MODEL, "prompt": "one"}, "order-17")
    sent = {
        tenant.door.tenant: tenant.submit("order-17", model=MODEL, prompt=prompt)
        for tenant, prompt in ((acme, "two"), (bob, "three"))
    }
    jobs = {prompt: job_of(here, prompt) for prompt in ("one", "two", "three")}
    owners = {prompt: job.tenant for prompt, job in jobs.items()}
    assert owners == {"one": "default", "two": "acme", "three": "bob"}
    for job in jobs.values():
        complete(here, UUID(str(job.id)))
    for name, prompt in (("acme", "two"), ("bob", "three")):
        assert sent[name].get(timeout=PATIENCE_S)["id"] == str(jobs[prompt].id)
    assert here.app.AsyncResult("order-17").get(timeout=PATIENCE_S)["id"] == str(jobs["one"].id)
    late = acme.submit(model=MODEL, prompt="four", delay_s=100, options={"expires": 1})
    assert "expired" in failure(acme, late.id)
    with pytest.raises(NoPermissionError):
        acme.redis.get(f"{bob.door.results}celery-task-meta-order-17")


def test_what_a_request_says_of_its_tenant_or_queue_does_not_count(
    here: RelayStack, acme: DoorTenant, bob: DoorTenant
) -> None:
    here.start_relay()
    acme.submit(model=MODEL, prompt="forged tenant", tenant="bob")
    acme.add(model=MODEL, prompt="forged in the stream", tenant="default")
    for prompt in ("forged tenant", "forged in the stream"):
        job = job_of(here, prompt)
        assert (job.tenant, job.state) == ("acme", JobState.FAILED)
        assert (job.error or {})["field"] == "tenant"

    def claim_to_be_bobs(envelope: dict[str, Any]) -> None:
        envelope["properties"]["delivery_info"] = {"exchange": "", "routing_key": bob.door.tasks}
        envelope["headers"]["delivery_info"] = {"routing_key": INTAKE_QUEUE}

    def without_a_tag(envelope: dict[str, Any]) -> None:
        claim_to_be_bobs(envelope)
        envelope["properties"]["delivery_tag"] = None

    assert "cannot read" in failure(acme, forge(acme, without_a_tag, model=MODEL, prompt="no tag"))
    assert cell(here.engine, "SELECT count(*) FROM jobs WHERE prompt = 'no tag'") == 0
    forge(acme, claim_to_be_bobs, model=MODEL, prompt="forged delivery")
    assert job_of(here, "forged delivery").tenant == "acme"
    acme.add(model=MODEL, prompt="own")
    assert job_of(here, "own").tenant == "acme"


def test_another_tenants_id_is_refused_and_tells_nothing(
    here: RelayStack, acme: DoorTenant, bob: DoorTenant
) -> None:
    here.start_relay()
    theirs = str(uuid4())
    bob.submit(theirs, model=MODEL, prompt="one")
    here.wait_for(theirs, lambda job: job.tenant == "bob")
    for fields in ({"prompt": "one"}, {"prompt": "one", "top_p": 9}):
        task_id = str(uuid4())
        acme.submit(task_id, model=MODEL, id=theirs, **fields)
        told = failure(acme, task_id)
        assert theirs in told
        assert "prompt" not in told
        assert "bob" not in told
    assert "is taken" in failure(acme, str(acme.submit(theirs, model=MODEL, prompt="x").id))
    here.wait_for(theirs, lambda job: job.tenant == "bob" and job.state is JobState.QUEUED)
    assert cell(here.engine, "SELECT count(*) FROM jobs") == 1
    complete(here, UUID(theirs))
    assert bob.app.AsyncResult(theirs).get(timeout=PATIENCE_S)["id"] == theirs


def test_an_id_that_follows_from_anothers_name_is_no_tenants_to_name(
    here: RelayStack, acme: DoorTenant, bob: DoorTenant
) -> None:
    here.start_relay()
    bob.submit("order-17", model=MODEL, prompt="one")
    theirs = str(job_of(here, "one").id)
    for fields in ({"prompt": "x"}, {"prompt": "x", "top_p": 9}):
        for made in (theirs, str(derived_id("not there yet"))):
            told = failure(acme, acme.submit(model=MODEL, id=made, **fields).id)
            assert ("top_p" if "top_p" in fields else "of version 8") in told
    acme.add(model=MODEL, id=str(derived_id("not there yet")), prompt="in the stream")
    acme.submit(theirs, model=MODEL, prompt="as a task")
    job = job_of(here, "as a task")
    assert (job.tenant, str(job.id) == theirs) == ("acme", False)
    until(lambda: any(b"in the stream" in dead[b"request"] for _, dead in here.dead_letters()))
    assert cell(here.engine, "SELECT count(*) FROM jobs") == 2


def body_of(envelope: dict[str, Any], *parts: Any) -> None:
    """A body in plain JSON."""
    envelope["body"] = json.dumps(parts)
    envelope["properties"]["body_encoding"] = None


def test_messages_that_are_more_than_a_request_are_refused(
    here: RelayStack, acme: DoorTenant
) -> None:
    """They would be sent, or run, with the rights of a relay."""
    here.start_relay()
    request = {"model": MODEL, "prompt": "one"}
    inner = {"task": "shardline.submit", "args": [], "kwargs": request, "options": {}}

    def other_task(envelope: dict[str, Any]) -> None:
        envelope["headers"]["task"] = "celery.starmap"
        body_of(envelope, [], {"task": inner, "it": [[]]}, {})

    def own_options(envelope: dict[str, Any]) -> None:
        info = {"routing_key": INTAKE_QUEUE}
        body_of(envelope, [], request, {"delivery_info": info, "id": "order-17"})

    def compressed(envelope: dict[str, Any]) -> None:
        envelope["headers"]["compression"] = "application/x-gzip"

    for change, told in ((other_task, "no task"), (own_options, "more than arguments")):
        assert told in failure(acme, forge(acme, change, **request))
    assert cell(here.engine, "SELECT count(*) FROM jobs") == 0

    def odd_headers(envelope: dict[str, Any]) -> None:
        envelope["headers"] |= {"update": 5, "timelimit": [1], "chord": link}

    link = here.app.signature("foreign.take", queue="celery")
    for kind in ("link", "link_error"):
        sent = acme.submit(model=MODEL, prompt="linked", options={kind: link})
        assert "single tasks" in failure(acme, sent.id)
    assert cell(here.engine, "SELECT count(*) FROM jobs") == 0
    forge(acme, odd_headers, model=MODEL, prompt="headers")
    assert job_of(here, "headers").state == JobState.QUEUED
    until(lambda: not here.active_tasks())
    assert not here.redis.exists("celery", CALLS)

    acme.submit("asks", model=MODEL, prompt="own", options={"ignore_result": False})
    job_of(here, "own")
    forge(acme, compressed, model=MODEL, prompt="unpacked")
    assert job_of(here, "unpacked").tenant == "acme"
    assert not here.redis.exists(
        "celery-task-meta-asks", f"{acme.door.results}celery-task-meta-asks"
    )


def test_refusals_are_failed_rows_of_the_tenant(here: RelayStack, acme: DoorTenant) -> None:
    with here.engine.begin() as connection:
        quotas.set_quota(connection, "acme", {"max_queued": 1})
    here.start_relay()
    acme.submit(model=MODEL, prompt="wrong", top_p=9)
    acme.add(model=MODEL, prompt="fits")
    assert (job_of(here, "wrong").tenant, job_of(here, "wrong").state) == ("acme", "failed")
    assert job_of(here, "fits").state == "queued"
    acme.add(model=MODEL, prompt="over in the stream")
    sent = acme.submit(model=MODEL, prompt="over in the queue")
    for prompt in ("over in the stream", "over in the queue"):
        job = job_of(here, prompt)
        assert (job.tenant, (job.error or {})["code"]) == ("acme", "limit_exceeded")
    assert "queued jobs" in failure(acme, sent.id)


def test_a_tenant_that_holds_its_own_locks_holds_up_no_other(
    here: RelayStack, acme: DoorTenant, bob: DoorTenant
) -> None:
    with here.engine.begin() as connection:
        quotas.set_quota(connection, "acme", {"max_queued": 100})
    here.start_relay()
    held = [f"held {number}" for number in range(6)]
    with here.engine.begin() as connection:
        connection.execute(text("SELECT FROM quota_use FOR UPDATE"))
        for prompt in held:
            acme.submit(model=MODEL, prompt=prompt)
        acme.add(model=MODEL, prompt="held in the stream")
        for prompt in ("by the queue", "by the stream"):
            if prompt == "by the queue":
                bob.submit(model=MODEL, prompt=prompt)
            else:
                bob.add(model=MODEL, prompt=prompt)
            assert job_of(here, prompt).tenant == "bob"
        assert cell(here.engine, "SELECT count(*) FROM jobs") == 2
    for prompt in (*held, "held in the stream"):
        assert job_of(here, prompt).tenant == "acme"


def test_what_a_killed_relay_had_taken_comes_back_to_its_tenant(
    here: RelayStack, acme: DoorTenant, tmp_path: Path
) -> None:
    relay = here.start_relay()
    acme.submit(model=MODEL, prompt="before")
    job_of(here, "before")
    arming = arm(tmp_path / "failpoints", Point.CELERY_TAKEN)

    def elsewhere(envelope: dict[str, Any]) -> None:
        envelope["properties"]["delivery_info"] = {"exchange": "", "routing_key": INTAKE_QUEUE}
        envelope["properties"]["delivery_tag"] = "mine"

    forge(acme, elsewhere, model=MODEL, prompt="taken")
    arming.wait(timeout_s=PATIENCE_S)
    relay.process.wait(PATIENCE_S)
    noted: Any = here.redis.hgetall(RELAY_UNACKED)
    ((tag, message),) = noted.items()
    assert tag != b"mine"
    assert loads(message)[1:] == ["", acme.door.tasks]
    here.start_relay()
    assert job_of(here, "taken").tenant == "acme"


def test_a_revoked_user_is_out_and_its_keys_are_not_read(
    here: RelayStack, acme: DoorTenant, bob: DoorTenant
) -> None:
    here.start_relay()
    acme.add(model=MODEL, prompt="before")
    job_of(here, "before")
    shardline(here.database_url, here.redis_url, "revoke-broker", acme.user)
    with pytest.raises((AuthenticationError, ConnectionError, NoPermissionError)):
        acme.redis.xadd(acme.door.requests, {"request": "{}"})

    def consumed() -> set[str]:
        with here.app.connection_for_write() as connection:
            found = here.app.control.inspect(timeout=0.3, connection=connection).active_queues()
        return {queue["name"] for queues in (found or {}).values() for queue in queues}

    until(lambda: consumed() == {INTAKE_QUEUE, bob.door.tasks}, timeout_s=PATIENCE_S)
    # Nobody of the tenant's can: what somebody else puts there waits for the next user.
    here.redis.xadd(acme.door.requests, {"request": json.dumps({"model": MODEL, "prompt": "late"})})
    bob.add(model=MODEL, prompt="after")
    assert job_of(here, "after").tenant == "bob"
    assert cell(here.engine, "SELECT count(*) FROM jobs WHERE prompt = 'late'") == 0
    shardline(here.database_url, here.redis_url, "grant-broker", "acme", acme.user)
    assert job_of(here, "late").tenant == "acme"
