"""Which jobs are sent and when, on a real Postgres: order, window, sending again, and preparation
before it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from shardline.contract.chat import Message
from shardline.contract.job import JobState
from shardline.store import jobs, models, pipelines
from shardline_server.store import outbox, preparation
from shardline_server.store.outbox import Send
from shardline_server.store.preparation import PreparedJob
from shardline_server.store.windows import WINDOW_MIN
from tests.integration.rows import (
    LONG_S,
    MODEL,
    cell,
    change,
    claim,
    model_row,
    pass_time,
    request,
    state,
    submit,
)

INSERT_ROWS = text("""
INSERT INTO jobs (model, prompt_ids, max_tokens, prepared_at, metadata)
SELECT :model, ARRAY[5], 1, now(), jsonb_build_object('number', number)
FROM generate_series(0, :num - 1) AS number
""")
NUMBERS = text("SELECT id, CAST(metadata ->> 'number' AS int) AS number FROM jobs")


def stamp(engine: Engine, resend_s: float = LONG_S) -> list[Send]:
    """One batch in a transaction of its own."""
    with engine.begin() as connection:
        return outbox.stamp_due(connection, resend_s=resend_s)


def ids_of(sends: list[Send]) -> list[UUID]:
    """Their jobs, in order."""
    return [send.job_id for send in sends]


def test_urgent_jobs_are_stamped_first_then_old_ones(engine: Engine) -> None:
    (late,) = submit(engine, priority=9)
    (first,), (second,) = submit(engine), submit(engine)
    (urgent,) = submit(engine, priority=0)
    sends = stamp(engine)
    assert ids_of(sends) == [urgent, first, second, late]
    assert {send.num_sends for send in sends} == {1}
    assert stamp(engine) == []


def test_rows_of_one_statement_are_stamped_in_their_order(engine: Engine) -> None:
    """They were created at one moment, so that only their ids order them."""
    with engine.begin() as connection:
        connection.execute(INSERT_ROWS, {"model": MODEL, "num": WINDOW_MIN})
    with engine.connect() as connection:
        numbers = {row.id: row.number for row in connection.execute(NUMBERS)}
    assert [numbers[job_id] for job_id in ids_of(stamp(engine))] == [*range(WINDOW_MIN)]


def test_requests_of_one_call_are_stamped_in_their_order(engine: Engine) -> None:
    ids = submit(engine, WINDOW_MIN)
    assert ids_of(stamp(engine)) == ids


def test_only_a_window_per_priority_is_sent_until_heads_claim(engine: Engine) -> None:
    ids = submit(engine, WINDOW_MIN + 10)
    (other,) = submit(engine, priority=1)
    first = stamp(engine)
    assert ids_of(first)[0] == other
    assert len(first) == WINDOW_MIN + 1
    assert stamp(engine) == []
    claim(engine, ids_of(first)[1:8])
    assert len(stamp(engine)) == 7
    assert (
        cell(engine, "SELECT count(*) FROM jobs WHERE sent_at IS NULL") == len(ids) - WINDOW_MIN - 7
    )


def test_the_window_is_four_times_the_seats_of_heads(engine: Engine) -> None:
    with engine.begin() as connection:
        pipelines.ready(connection, "p", 1, seats=20, stages=[], exact=True, kv_tokens=64)
    submit(engine, 100)
    assert len(stamp(engine)) == 80


@pytest.mark.parametrize(
    "change_row", ["not_before = now() + interval '1 hour'", "cancel_requested_at = now()"]
)
def test_a_job_that_is_not_due_is_not_stamped(engine: Engine, change_row: str) -> None:
    submit(engine)
    change(engine, f"UPDATE jobs SET {change_row}")
    assert stamp(engine) == []


def test_an_unclaimed_job_is_sent_again_ever_more_rarely(engine: Engine) -> None:
    (job_id,) = submit(engine)
    stamp(engine)
    for num_sends in range(2, 8):
        with engine.begin() as connection:
            pass_time(connection, job_id, "sent_at")
        assert [send.num_sends for send in stamp(engine, resend_s=200.0)] == [num_sends]
    with engine.begin() as connection:
        pass_time(connection, job_id, "sent_at")
    assert stamp(engine, resend_s=300.0) == []


def test_jobs_that_could_not_be_sent_are_due_at_once_unless_claimed(engine: Engine) -> None:
    ids = submit(engine, 3)
    stamp(engine)
    claim(engine, ids[:1])
    with engine.begin() as connection:
        outbox.unstamp(connection, ids[:2])
    assert ids_of(stamp(engine)) == [ids[1]]
    with engine.begin() as connection:
        assert outbox.unstamp_sent(connection) == 2
    assert set(ids_of(stamp(engine))) == set(ids[1:])


def test_concurrent_relays_keep_to_the_window_together(engine: Engine) -> None:
    submit(engine, 3 * WINDOW_MIN)
    gate = threading.Barrier(4)

    def race(_: int) -> list[UUID]:
        gate.wait()
        return [job_id for _ in range(5) for job_id in ids_of(stamp(engine))]

    with ThreadPoolExecutor(4) as threads:
        sent = [job_id for batch in threads.map(race, range(4)) for job_id in batch]
    assert len(sent) == len(set(sent)) == WINDOW_MIN


def test_the_backlog_of_one_model_does_not_hold_up_another(engine: Engine) -> None:
    submit(engine, WINDOW_MIN + 1)
    with engine.begin() as connection:
        models.register_model(connection, model_row("n"))
    (other,) = submit(engine, model="n")
    assert other in ids_of(stamp(engine))


def take(engine: Engine, **bounds: int) -> list[UUID]:
    """As one relay, for a minute."""
    with engine.begin() as connection:
        return [row.id for row in preparation.take_unprepared(connection, lease_s=60, **bounds)]


def test_unprepared_rows_are_taken_by_one_relay_and_not_sent(engine: Engine) -> None:
    with engine.begin() as connection:
        stored = jobs.insert_jobs(connection, [request(), request(seed=None, prompt=(1, 2))])
        ids = [one.job_id for one in stored]
    assert stamp(engine) == []
    assert set(take(engine)) == set(ids)
    assert take(engine) == []
    with engine.begin() as connection:
        preparation.mark_if_unprepared(
            connection,
            [PreparedJob(id=ids[0], model=MODEL, prompt_ids=(5, 6), max_tokens=4, seed=99)],
        )
        preparation.fail_if_unprepared(
            connection, {ids[1]: {"code": "invalid_request", "field": "prompt"}}
        )
    assert state(engine, ids[1]) is JobState.FAILED
    assert ids_of(stamp(engine)) == [ids[0]]
    (claimed,) = claim(engine, ids)
    assert (claimed.prompt_ids, claimed.max_tokens, claimed.seed) == ((5, 6), 4, 99)


def test_rows_of_a_silent_relay_go_to_the_next_one(engine: Engine) -> None:
    (job_id,) = insert(engine)
    assert take(engine) == [job_id]
    with engine.begin() as connection:
        pass_time(connection, job_id, "preparing_until")
    assert take(engine) == [job_id]


def test_the_first_of_two_marks_of_one_row_stays(engine: Engine) -> None:
    (job_id,) = insert(engine)
    ready = PreparedJob(id=job_id, model=MODEL, prompt_ids=(5, 6), max_tokens=4, seed=99)
    with engine.begin() as connection:
        assert preparation.mark_if_unprepared(connection, [ready]) == 1
        assert preparation.mark_if_unprepared(connection, [replace(ready, seed=98)]) == 0
        assert (
            preparation.fail_if_unprepared(
                connection, {job_id: {"code": "invalid_request", "field": "prompt"}}
            )
            == []
        )
    (claimed,) = claim(engine, [job_id])
    assert claimed.seed == 99


def test_a_batch_of_long_texts_ends_with_the_row_that_fills_it(engine: Engine) -> None:
    ids = [insert(engine, prompt="one " * 1_000)[0] for _ in range(4)]
    assert take(engine, max_bytes=7_000) == ids[:2]
    assert take(engine, max_bytes=1) == ids[2:3]
    assert take(engine) == ids[3:]


def test_long_chats_and_lists_of_ids_count_by_their_size(engine: Engine) -> None:
    chat = "".join(map(str, range(10_000)))
    insert(engine, prompt=None, messages=(Message(role="user", content=chat),))
    insert(engine, prompt=tuple(range(10_000)))
    assert [len(take(engine, max_bytes=10_000)) for _ in range(2)] == [1, 1]


def insert(engine: Engine, **fields: Any) -> list[UUID]:
    """A job that arrived without preparation."""
    with engine.begin() as connection:
        return [one.job_id for one in jobs.insert_jobs(connection, [request(**fields)])]
