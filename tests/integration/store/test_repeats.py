"""What is the same request, on a real Postgres: ids and keys that come again, alone, in thousands
and at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from psycopg.errors import DeadlockDetected
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError

from shardline.base.errors import Conflict, Invalid
from shardline.contract.chat import Message
from shardline.contract.ids import new_id
from shardline.contract.job import JobRequest, JobState
from shardline.store import jobs
from shardline.store.connection.encoding import dump
from shardline.store.inserts import _row
from shardline.store.jobs import StoredRequest
from shardline.store.row_inserts import INSERT
from shardline_server.store import preparation
from shardline_server.store.preparation import PreparedJob
from tests.integration.rows import MODEL, cell, change, claim, end, request, success

CHAT = (Message(role="system", content="be brief"), Message(role="user", content="hi", name="ann"))

PAUSE = 4711
"""An advisory lock: a transaction that has inserted one row waits for it before its second."""

PAUSE_BEFORE_THE_SECOND_ROW = f"""
CREATE FUNCTION pause() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM jobs) THEN PERFORM pg_advisory_xact_lock_shared({PAUSE}); END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER pause BEFORE INSERT ON jobs FOR EACH ROW EXECUTE FUNCTION pause();
"""


def insert(engine: Engine, *requests: JobRequest, prepared: Any = None) -> list[StoredRequest]:
    """In a transaction of its own."""
    with engine.begin() as connection:
        return jobs.insert_jobs(connection, requests, prepared=prepared)


def answer(engine: Engine, wanted: JobRequest, *, prepared: Any = None) -> StoredRequest | str:
    """What its producer gets: the job, or the text of a conflict."""
    try:
        (stored,) = insert(engine, wanted, prepared=prepared)
    except Conflict as error:
        return str(error)
    return stored


def names() -> list[dict[str, object]]:
    """By what a repeat may be known."""
    return [{"id": new_id()}, {"idempotency_key": "k"}, {"id": new_id(), "idempotency_key": "l"}]


@pytest.mark.parametrize("name", names(), ids=["id", "key", "both"])
@pytest.mark.parametrize(
    "content",
    [
        {"prompt": "text"},
        {"prompt": None, "messages": CHAT},
        {"prompt": (5, 6)},
        {
            "temperature": 0.1,
            "top_p": 1e-7,
            "seed": 2**63 - 1,
            "stop": ("a", "ä"),
            "stop_token_ids": (1,),
            "max_tokens": 3,
        },
    ],
    ids=["text", "chat", "token ids", "parameters"],
)
def test_a_request_repeated_at_any_stage_of_its_life_is_the_same_job(
    engine: Engine, name: dict[str, object], content: dict[str, object]
) -> None:
    wanted = request(**name, **content)
    (first,) = insert(engine, wanted)
    assert first.is_new
    repeat = StoredRequest(job_id=first.job_id, is_new=False)

    assert answer(engine, wanted) == repeat
    with engine.begin() as connection:
        ready = PreparedJob(
            id=first.job_id, model=MODEL, prompt_ids=(5, 6), max_tokens=8, seed=wanted.seed
        )
        preparation.mark_if_unprepared(connection, [ready])
    assert answer(engine, wanted) == repeat
    (claimed,) = claim(engine, [first.job_id])
    assert answer(engine, wanted, prepared=[((5, 6), 8)]) == repeat
    end(engine, success(claimed))
    assert answer(engine, wanted) == repeat
    assert cell(engine, "SELECT count(*) FROM jobs") == 1


@pytest.mark.parametrize(
    ("model", "adapter"), [("m:legal", None), ("m", "legal")], ids=["address", "field"]
)
def test_a_repeat_may_name_an_adapter_either_way(
    engine: Engine, model: str, adapter: str | None
) -> None:
    (first,) = insert(engine, request(model="m:legal", idempotency_key="k"))
    with engine.begin() as connection:
        ready = PreparedJob(
            id=first.job_id, model=MODEL, adapter="legal", prompt_ids=(5,), max_tokens=8, seed=None
        )
        preparation.mark_if_unprepared(connection, [ready])

    repeat = request(model=model, adapter=adapter, idempotency_key="k")

    assert insert(engine, repeat) == [StoredRequest(job_id=first.job_id, is_new=False)]
    with pytest.raises(Conflict, match="another model"):
        insert(engine, request(adapter="medical", idempotency_key="k"))


def test_a_repeat_with_another_time_trace_or_note_keeps_the_first_one(engine: Engine) -> None:
    (first,) = insert(engine, request(idempotency_key="k", metadata={"try": 1}, priority=1))
    again = request(
        idempotency_key="k",
        metadata={"try": 2},
        priority=9,
        delay_s=5.0,
        deadline_s=7.0,
        max_crashes=1,
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )
    assert insert(engine, again) == [StoredRequest(job_id=first.job_id, is_new=False)]
    assert cell(engine, "SELECT metadata ->> 'try' || priority FROM jobs") == "11"


@pytest.mark.parametrize("name", names(), ids=["id", "key", "both"])
@pytest.mark.parametrize(
    ("other", "fields"),
    [
        ({"model": "n"}, "model"),
        ({"prompt": "another"}, "prompt"),
        ({"prompt": (1, 2)}, "prompt"),
        ({"prompt": None, "messages": CHAT}, "prompt, messages"),
        ({"temperature": 0.5, "max_tokens": 3}, "max_tokens, temperature"),
        ({"seed": 7}, "seed"),
    ],
)
def test_a_conflict_over_an_id_or_key_names_the_fields(
    engine: Engine, name: dict[str, object], other: dict[str, object], fields: str
) -> None:
    insert(engine, request(**name))
    with pytest.raises(Conflict, match=f"and another {fields}; use a new"):
        insert(engine, request(**name, **other))


def test_a_changed_word_of_a_chat_is_a_conflict(engine: Engine) -> None:
    insert(engine, request(prompt=None, messages=CHAT, idempotency_key="k"))
    with pytest.raises(Conflict, match="another messages"):
        insert(engine, request(prompt=None, messages=CHAT[:1], idempotency_key="k"))


def test_another_tenants_id_is_a_conflict(engine: Engine) -> None:
    change(engine, "INSERT INTO tenants (id) VALUES ('t')")
    job_id = new_id()
    insert(engine, request(id=job_id))
    with pytest.raises(Conflict, match="is taken; use a new one"):
        insert(engine, request(id=job_id, tenant="t"))
    (theirs,) = insert(engine, request(idempotency_key="k", tenant="t"))
    (ours,) = insert(engine, request(idempotency_key="k"))
    assert theirs.is_new
    assert ours.is_new


def test_an_id_of_one_job_with_a_key_of_another_is_a_conflict(engine: Engine) -> None:
    (first, _) = insert(engine, request(), request(idempotency_key="k"))
    with pytest.raises(Conflict, match="send one"):
        insert(engine, request(id=first.job_id, idempotency_key="k"))


def test_a_corrected_request_under_a_refused_id_is_a_conflict_with_the_reason(
    engine: Engine,
) -> None:
    refused = jobs.FailedRequest(
        id=new_id(), model=MODEL, prompt="text", error=Invalid("top_p", "bad", "fix").as_dict()
    )
    with engine.begin() as connection:
        jobs.insert_failed(connection, [refused])
    with pytest.raises(Conflict, match=r"was refused as invalid \(bad\); use a new id"):
        insert(engine, request(id=refused.id))


def test_repeating_a_job_found_invalid_tells_its_producer_why(engine: Engine) -> None:
    (stored,) = insert(engine, request(idempotency_key="k"))
    with engine.begin() as connection:
        preparation.fail_if_unprepared(
            connection, {stored.job_id: Invalid("model", "unknown", "fix").as_dict()}
        )
    assert insert(engine, request(idempotency_key="k")) == [
        StoredRequest(job_id=stored.job_id, is_new=False)
    ]
    with engine.begin() as connection:
        job = jobs.get_job(connection, stored.job_id)
    assert job is not None
    assert job.state is JobState.FAILED


def test_only_the_first_of_one_id_twice_in_a_batch_is_new(engine: Engine) -> None:
    own = new_id()
    stored = insert(
        engine,
        request(id=own),
        request(),
        request(id=own),
        request(idempotency_key="k"),
        request(idempotency_key="k"),
    )
    assert [one.is_new for one in stored] == [True, True, False, True, False]
    assert stored[0].job_id == stored[2].job_id == own
    assert stored[3].job_id == stored[4].job_id


def test_forty_thousand_keys_in_another_order_find_their_jobs(engine: Engine) -> None:
    keyed = [request(prompt="x", idempotency_key=f"key {number}") for number in range(40_000)]
    first = insert(engine, *keyed)
    again = insert(engine, *reversed(keyed))
    assert [one.job_id for one in again] == [one.job_id for one in reversed(first)]
    assert {one.is_new for one in first} == {True}
    assert {one.is_new for one in again} == {False}


def test_two_batches_with_the_same_keys_in_other_orders_both_succeed(engine: Engine) -> None:
    one = [request(idempotency_key=key) for key in "ab"]
    two = [request(idempotency_key=key) for key in "ba"]
    stored = at_once(engine, one, two, jobs.insert_jobs)
    ids = [
        {request.idempotency_key: row.job_id for request, row in zip(batch, rows, strict=True)}
        for batch, rows in zip((one, two), stored, strict=True)
    ]
    assert ids[0] == ids[1]
    assert sorted(row.is_new for rows in stored for row in rows) == [False, False, True, True]


def test_two_statements_in_the_order_of_requests_deadlock(engine: Engine) -> None:
    """What the one above is kept from."""
    one = [request(idempotency_key=key) for key in "ab"]
    two = [request(idempotency_key=key) for key in "ba"]
    with pytest.raises(OperationalError) as caught:
        at_once(
            engine,
            one,
            two,
            lambda connection, batch: list(
                connection.exec_driver_sql(
                    INSERT, {"rows": dump([_row(one, None) for one in batch])}
                )
            ),
        )
    assert isinstance(caught.value.orig, DeadlockDetected)


def at_once(
    engine: Engine, one: Sequence[JobRequest], two: Sequence[JobRequest], work: Any
) -> list[Any]:
    """Each in a transaction of its own; neither goes past its first row before the other got there,
    or waits."""
    change(engine, PAUSE_BEFORE_THE_SECOND_ROW)

    def run(batch: Sequence[JobRequest]) -> Any:
        with engine.begin() as connection:
            return work(connection, batch)

    with ThreadPoolExecutor(2) as threads, engine.connect() as gate:
        gate.execute(text(f"SELECT pg_advisory_lock({PAUSE})"))
        running = [threads.submit(run, batch) for batch in (one, two)]
        waiting = text(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        while gate.scalar(waiting) < len(running) and not any(one.done() for one in running):
            gate.rollback()
        gate.execute(text(f"SELECT pg_advisory_unlock({PAUSE})"))
        return [one.result() for one in running]
