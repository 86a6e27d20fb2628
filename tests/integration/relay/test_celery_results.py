"""What a producer of the Celery door hears by its task's own id, whatever becomes of the job:
relays and backends."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from celery import Celery, chord
from celery.exceptions import TaskRevokedError

from services.standalone.servers import Valkey
from shardline.contract.job import JobState
from shardline.contract.queues import INTAKE_QUEUE, SUBMIT_TASK
from shardline.store import jobs
from shardline_server.store.ends import End
from tests.integration.relay.foreign_stack import ForeignStack, foreign_stack
from tests.integration.relay.relay_stack import PATIENCE_S
from tests.integration.relay.test_canvas import TEXT, foreign, submit
from tests.integration.rows import cell, change, claim_one, end_one, request
from tests.polling import until

CANCELLED = r"cancelled|revoked"
"""As relays say it, or as the workers of the foreign app do, which hear of the revoke too."""


@pytest.fixture
def backend_server(tmp_path: Path) -> Iterator[Valkey]:
    """Another Redis, for results alone."""
    server = Valkey(tmp_path / "backend")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def here(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[ForeignStack]:
    """With a relay, and Redis as the backend."""
    with foreign_stack(
        database_url, redis_url, tmp_path, backend=redis_url, foreign_backend=redis_url
    ) as here:
        here.relays.start_relay()
        yield here


def send(here: ForeignStack, **options: Any) -> Any:
    fields = options.pop("kwargs", {})
    return here.app.send_task(
        SUBMIT_TASK, kwargs={"model": "m", "prompt": "one", **fields}, queue=INTAKE_QUEUE, **options
    )


JOB_ID = "3b0e7c52-6c1f-4c58-9a0d-0f5d8e1b7a21"


@pytest.mark.parametrize(
    "task_id",
    ["order-17", "417", JOB_ID.replace("-", ""), JOB_ID.upper(), "ü/?" * 80, JOB_ID],
    ids=["name", "number", "hex", "upper", "long", "uuid"],
)
def test_a_result_is_found_under_any_task_id(here: ForeignStack, task_id: str) -> None:
    result = send(here, task_id=task_id)
    (job_id,) = here.complete()
    value = result.get(timeout=PATIENCE_S)
    assert (result.state, value["id"], value["text"]) == ("SUCCESS", str(job_id), TEXT)


@pytest.mark.parametrize("succeeds", [True, False])
def test_a_repeat_of_a_forgotten_result_gets_it_and_calls_nobody_again(
    here: ForeignStack, succeeds: bool
) -> None:
    take = foreign(here.app, "take")
    linked: dict[str, Any] = {"task_id": str(uuid4()), "link": take, "link_error": take}
    result = send(here, **linked)
    if succeeds:
        here.complete()
    else:
        here.fail_next()
    first = result.get(timeout=PATIENCE_S, propagate=False)
    here.wait_for_calls(1)
    here.wait_until_settled()
    result.forget()

    again = send(here, **linked)

    assert str(again.get(timeout=PATIENCE_S, propagate=False)) == str(first)
    here.wait_until_settled()
    assert len(here.calls()) == 1


def test_a_repeat_by_key_or_id_under_another_task_id_gets_the_same_completion(
    here: ForeignStack,
) -> None:
    job_id = str(uuid4())
    results = [send(here, task_id="first", kwargs={"idempotency_key": "k", "id": job_id})]
    here.relays.wait_for(job_id, lambda job: job.state is JobState.QUEUED)
    results += [
        send(here, task_id="second", kwargs={"idempotency_key": "k"}),
        send(here, task_id="third", kwargs={"id": job_id, "idempotency_key": "k"}),
    ]
    other = send(here, task_id="other", kwargs={"prompt": "two", "idempotency_key": "k"})
    with pytest.raises(Exception, match="key"):
        other.get(timeout=PATIENCE_S)
    until(lambda: cell(here.relays.engine, "SELECT count(*) FROM celery_tasks") == 4)
    here.complete()
    late = send(here, task_id="late", kwargs={"id": job_id, "idempotency_key": "k"})
    assert {one.get(timeout=PATIENCE_S)["id"] for one in (*results, late)} == {job_id}


@pytest.mark.parametrize("is_over", [False, True], ids=["waits", "is over"])
@pytest.mark.parametrize(
    "fields", [{"prompt": "two"}, {"tenant": "other"}], ids=["request", "tenant"]
)
def test_a_task_hears_that_its_id_is_that_of_another_tasks_job(
    here: ForeignStack, fields: dict[str, str], is_over: bool
) -> None:
    change(here.relays.engine, "INSERT INTO tenants (id) VALUES ('other')")
    job_id = str(uuid4())
    first = send(here, task_id="first", kwargs={"id": job_id})
    here.relays.wait_for(job_id, lambda job: job.state is JobState.QUEUED)
    if is_over:
        here.complete()
    taken = send(here, task_id=job_id, kwargs=fields)
    with pytest.raises(Exception, match="use a new"):
        taken.get(timeout=PATIENCE_S)
    if not is_over:
        here.complete()
    assert first.get(timeout=PATIENCE_S)["id"] == job_id


@pytest.mark.parametrize("terminate", [True, False])
def test_a_revoked_task_with_a_countdown_never_runs_and_is_revoked(
    here: ForeignStack, terminate: bool
) -> None:
    results = [
        send(here, countdown=countdown, task_id=f"in {countdown}") for countdown in (2, 75, 100_000)
    ]
    until(lambda: cell(here.relays.engine, "SELECT count(*) FROM jobs") == len(results))
    here.app.control.revoke([one.id for one in results], terminate=terminate)
    for one in results:
        with pytest.raises(TaskRevokedError, match=CANCELLED):
            one.get(timeout=PATIENCE_S)
        assert one.state == "REVOKED"
    cancelled = "SELECT count(*) FROM jobs WHERE fence = 0 AND state = 'cancelled'"
    until(lambda: cell(here.relays.engine, cancelled) == len(results), timeout_s=PATIENCE_S)


def test_a_countdown_delays_the_job_and_no_message_waits_in_the_relay(here: ForeignStack) -> None:
    send(here, countdown=50)
    delay_s = until(
        lambda: cell(
            here.relays.engine, "SELECT max(extract(epoch FROM not_before - created_at)) FROM jobs"
        )
    )
    assert 40 < delay_s < 51
    here.relays.relays[0].stop()
    assert here.relays.redis.llen(INTAKE_QUEUE) == 0


def test_a_revoke_that_overtakes_its_task_outlives_the_relay_that_heard_it(
    here: ForeignStack,
) -> None:
    for task_id in ("order-18", str(uuid4())):
        here.app.control.revoke(task_id, reply=True)
        until(
            lambda: cell(
                here.relays.engine, "SELECT count(*) FROM celery_tasks WHERE revoked_at IS NOT NULL"
            )
        )
        here.relays.relays[-1].kill()
        result = send(here, task_id=task_id)
        here.relays.start_relay()
        with pytest.raises(TaskRevokedError, match=CANCELLED):
            result.get(timeout=PATIENCE_S)
        change(here.relays.engine, "DELETE FROM celery_tasks")


def test_a_revoke_finds_a_job_that_has_another_id_than_its_task(here: ForeignStack) -> None:
    job_id = uuid4()
    result = send(here, task_id="mine", kwargs={"id": str(job_id)}, countdown=100)
    here.relays.wait_for(job_id, lambda job: job.state is JobState.QUEUED)
    here.app.control.revoke("mine")
    with pytest.raises(TaskRevokedError):
        result.get(timeout=PATIENCE_S)


def test_a_task_that_expires_does_not_begin_and_one_that_began_goes_on(here: ForeignStack) -> None:
    began = send(here, expires=4, task_id="began")
    (sent,) = here.relays.take_messages(1)
    assert here.relays.claim(sent)
    waits = send(here, expires=2, countdown=100, task_id="waits")
    over = send(here, expires=datetime(2020, 1, 1, tzinfo=UTC), task_id="over")
    for one in (waits, over):
        with pytest.raises(TaskRevokedError, match="expired"):
            one.get(timeout=PATIENCE_S)
    until(
        lambda: (
            cell(
                here.relays.engine, "SELECT count(*) FROM celery_tasks WHERE expires_at IS NOT NULL"
            )
            == 0
        )
    )
    job = here.relays.job(sent)
    assert job is not None
    assert job.state is JobState.RUNNING
    assert began.state == "PENDING"


def test_a_cancelled_running_job_is_revoked_for_its_producer(here: ForeignStack) -> None:
    result = send(here)
    (sent,) = here.relays.take_messages(1)
    claimed = claim_one(here.relays.engine, UUID(sent))
    here.app.control.revoke(result.id, terminate=True)
    here.relays.wait_for(sent, lambda job: job.cancel_requested)
    end_one(
        here.relays.engine,
        End(job_id=claimed.job_id, fence=claimed.fence, state=JobState.CANCELLED),
    )
    with pytest.raises(TaskRevokedError, match=CANCELLED):
        result.get(timeout=PATIENCE_S)
    assert result.state == "REVOKED"


def test_fields_of_any_name_and_values_that_look_like_kombus_lose_no_request(
    here: ForeignStack,
) -> None:
    for field in ("task", "self", "task_id", "args", "request"):
        with pytest.raises(Exception, match=f"{field}: object contains unknown field"):
            send(here, kwargs={field: "x"}).get(timeout=PATIENCE_S)
    for fields in ({"a\0": 1}, {"a\0": 1, "model": None}):
        with pytest.raises(Exception, match=r"unknown field|model"):
            send(here, kwargs=fields).get(timeout=PATIENCE_S)
    odd = {"__type__": "no such type", "__value__": 1}
    times = {"__type__": "datetime", "__value__": {"not": "a time"}}
    result = send(
        here,
        kwargs={"metadata": {"odd": odd, "times": times, "at": datetime(2026, 1, 2, tzinfo=UTC)}},
    )
    (job_id,) = here.complete()
    assert result.get(timeout=PATIENCE_S)["text"] == TEXT
    job = here.relays.job(job_id)
    assert job is not None
    assert job.metadata == {"odd": odd, "times": times, "at": "2026-01-02T00:00:00Z"}


def test_positional_values_are_prompts_and_what_is_none_is_refused_by_name(
    here: ForeignStack,
) -> None:
    given: list[Any] = [
        "one",
        {"text": "two", "id": "x"},
        [3, 4],
        {"prompt": "three"},
        ["one", {"text": "two"}],
    ]
    for value in given:
        submit(here.app, value).apply_async()
    found = [here.relays.job(job_id) for job_id in here.complete(len(given))]
    prompts = [job.prompt or job.prompt_token_ids for job in found if job is not None]
    assert sorted(map(str, prompts)) == sorted(
        map(str, ["one", "two", (3, 4), "three", "one\n\ntwo"])
    )
    for args, problem in [
        ((None,), "null"),
        (("one", "two"), "2 positional"),
        (({"other": 1},), "dict"),
        ((7,), "int"),
    ]:
        with pytest.raises(Exception, match=problem):
            submit(here.app, *args).apply_async().get(timeout=PATIENCE_S)
    with pytest.raises(Exception, match="both set"):
        submit(here.app, "one", prompt="two").apply_async().get(timeout=PATIENCE_S)


def test_ignored_results_are_not_stored_and_priorities_are_the_jobs(here: ForeignStack) -> None:
    ignored = send(here, ignore_result=True, priority=9)
    other = send(here)
    jobs_here = [here.relays.job(job_id) for job_id in here.complete(2)]
    assert other.get(timeout=PATIENCE_S)["text"] == TEXT
    here.wait_until_settled()
    assert here.relays.redis.exists(f"celery-task-meta-{ignored.id}") == 0
    assert sorted(job.priority for job in jobs_here if job is not None) == [5, 9]


def test_an_entry_that_cannot_be_read_stops_no_later_result(here: ForeignStack) -> None:
    task_id = str(uuid4())
    job_id = uuid4()
    poison = b'{"status": "REVOKED", "result": {"id": "x"}, "task_id": "x"}'
    for key in (task_id, job_id):
        here.relays.redis.set(f"celery-task-meta-{key}", poison)
    send(here, task_id=task_id, kwargs={"top_p": 9})
    with here.relays.engine.begin() as connection:
        jobs.insert_jobs(connection, [request(id=job_id, delay_s=100)])
    here.app.control.revoke(str(job_id))
    for _ in range(3):
        with pytest.raises(Exception, match="top_p"):
            send(here, kwargs={"top_p": 9}).get(timeout=PATIENCE_S)


@pytest.mark.parametrize("kind", ["database", "rpc"])
def test_other_backends_tell_every_end(
    database_url: str, redis_url: str, tmp_path: Path, kind: str
) -> None:
    backend = f"db+sqlite:///{tmp_path / 'results.sqlite'}" if kind == "database" else "rpc://"
    with foreign_stack(
        database_url, redis_url, tmp_path, backend=backend, foreign_backend=backend
    ) as here:
        here.relays.start_relay()
        good = send(here, task_id="order-19")
        here.complete()
        assert good.get(timeout=PATIENCE_S)["text"] == TEXT
        with pytest.raises(Exception, match="top_p"):
            send(here, kwargs={"top_p": 9}).get(timeout=PATIENCE_S)
        with pytest.raises(TaskRevokedError, match="expired"):
            send(here, kwargs={"delay_s": 100, "deadline_s": 0.01}).get(timeout=PATIENCE_S)
        if kind == "database":
            body = chord([submit(here.app, "one"), submit(here.app, "two")])(
                foreign(here.app, "take")
            )
            here.complete(2)
            assert [one["text"] for one in body.get(timeout=PATIENCE_S)] == [TEXT, TEXT]


def test_without_a_backend_callbacks_come_and_a_chord_is_refused_by_name(
    database_url: str, redis_url: str, tmp_path: Path
) -> None:
    with foreign_stack(
        database_url, redis_url, tmp_path, backend=None, foreign_backend=redis_url
    ) as here:
        here.relays.start_relay()
        submit(here.app, "one").apply_async(link=foreign(here.app, "take"))
        here.complete()
        submit(here.app, "one", top_p=9).apply_async(
            link_error=foreign(here.app, "blame"), task_id="order-20"
        )
        calls = here.wait_for_calls(2)
        assert ["blame", "order-20"] in calls
        chord([submit(here.app, "one"), submit(here.app, "two")])(foreign(here.app, "take"))
        query = "SELECT count(*) FROM jobs WHERE error->>'field' = 'chord'"
        until(lambda: cell(here.relays.engine, query) == 2)


def test_a_hanging_backend_holds_up_no_callback_and_gets_its_results_afterwards(
    database_url: str, redis_url: str, backend_server: Valkey, tmp_path: Path
) -> None:
    backend = backend_server.url
    with foreign_stack(
        database_url, redis_url, tmp_path, backend=backend, foreign_backend=backend
    ) as here:
        here.relays.start_relay()
        backend_server.pause()
        try:
            # A producer with this backend would wait for it itself.
            sender = Celery(broker=redis_url, set_as_current=False)
            sent = [
                submit(sender, "one").apply_async(link=foreign(sender, "take")).id for _ in range(6)
            ]
            here.complete(len(sent))
            until(
                lambda: (
                    cell(here.relays.engine, "SELECT count(*) FROM jobs WHERE state = 'succeeded'")
                    == 6
                )
            )
            sends = "shardline:task:*:sends"
            until(
                lambda: len(list(here.relays.redis.scan_iter(sends))) == len(sent),
                timeout_s=PATIENCE_S,
            )
        finally:
            backend_server.resume()
        values = [here.app.AsyncResult(task_id).get(timeout=PATIENCE_S) for task_id in sent]
        assert [value["text"] for value in values] == [TEXT] * len(sent)
        here.wait_until_settled()
        assert len(here.calls()) == len(sent)
