"""The doors' statements on a real Postgres: insert, repeat, read, list, cancel."""

from __future__ import annotations

import time
from collections.abc import Iterator
from uuid import UUID

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import IntegrityError

from shardline.errors import Conflict, Invalid
from shardline.ids import new_id
from shardline.job import JobRequest, JobState, Message, SamplingParams, TokenLogprob
from shardline.store import claims, ends, jobs, leases, listing
from shardline.store.database import connect_async
from shardline.store.leases import Beat
from shardline.store.progress import Asked, read_progress
from tests.integration.store_world import (
    LONG_S,
    MODEL,
    cell,
    change,
    claim,
    end,
    request,
    running,
    state,
    submit,
    success,
    world,
)


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """A fresh world."""
    with world(database_url) as engine:
        yield engine


def insert(engine: Engine, *requests: JobRequest) -> list[UUID]:
    """In a transaction of its own."""
    with engine.begin() as connection:
        return [one.job_id for one in jobs.insert_jobs(connection, requests)]


def test_given_requests_of_every_kind_when_inserted_then_they_read_back_as_they_were(engine: Engine) -> None:
    messages = (Message(role="user", content="ä\nhi"),)
    chat = request(prompt=None, messages=messages, metadata={"a": [1, {"b": None}]}, priority=0, temperature=0.5)
    ids = insert(engine, request(seed=7, max_tokens=3), chat, request(prompt=(1, 2, 3)))
    with engine.begin() as connection:
        plain, talked, by_ids = jobs.get_jobs(connection, ids)
    assert (plain.prompt, plain.seed, plain.params.max_tokens, plain.state) == ("text", 7, 3, JobState.QUEUED)
    assert (talked.metadata, talked.priority, talked.params.temperature) == ({"a": [1, {"b": None}]}, 0, 0.5)
    assert by_ids.prompt_token_ids == (1, 2, 3)
    assert cell(engine, "SELECT messages FROM jobs WHERE id = :id", id=ids[1]) == [{"role": "user", "content": "ä\nhi"}]


def test_given_no_seed_when_inserted_then_each_row_draws_its_own(engine: Engine) -> None:
    submit(engine, 20)
    assert cell(engine, "SELECT count(DISTINCT seed) FROM jobs") == 20


def test_given_plain_sql_when_inserted_then_two_columns_are_enough(engine: Engine) -> None:
    change(engine, "INSERT INTO jobs (model, prompt) VALUES ('m', 'text')")
    assert cell(engine, "SELECT state || ' ' || tenant_id || ' ' || (seed >= 0) FROM jobs") == "queued default true"


@pytest.mark.parametrize(
    ("columns", "values", "constraint"),
    [
        ("model", "'m'", "jobs_needs_a_prompt_or_messages_or_prompt_ids"),
        ("model, prompt, messages", "'m', 'x', '[]'", "jobs_needs_a_prompt_or_messages_or_prompt_ids"),
        ("model, messages", "'m', '{}'", "jobs_messages_is_an_array"),
        ("model, prompt, params", "'m', 'x', '[1]'", "jobs_params_is_an_object"),
        ("model, prompt, priority", "'m', 'x', 10", "jobs_priority_is_0_to_9"),
        ("model, prompt, state", "'m', 'x', 'going'", "jobs_state_is_known"),
        ("model, prompt, state", "'m', 'x', 'running'", "jobs_a_lease_belongs_to_running"),
        ("model, prompt, state", "'m', 'x', 'succeeded'", "jobs_finished_at_belongs_to_an_end"),
        ("model, prompt, prepared_at", "'m', 'x', now()", "jobs_prepared_means_tokenised"),
        ("model, prompt", "'', 'x'", "jobs_model_is_1_to_256_characters"),
    ],
)
def test_given_a_nonsense_row_when_inserted_by_hand_then_a_constraint_says_why(
    engine: Engine, columns: str, values: str, constraint: str
) -> None:
    with pytest.raises(IntegrityError, match=constraint):
        change(engine, f"INSERT INTO jobs ({columns}) VALUES ({values})")


def test_given_a_known_id_or_key_when_inserted_again_then_the_first_job_is_returned(engine: Engine) -> None:
    job_id = new_id()
    first, keyed = insert(engine, request(id=job_id), request(idempotency_key="k"))
    assert insert(engine, request(id=job_id), request(idempotency_key="k"), request(idempotency_key="k")) == [
        job_id,
        keyed,
        keyed,
    ]
    assert first == job_id
    assert cell(engine, "SELECT count(*) FROM jobs") == 2


def test_given_one_key_twice_in_a_batch_when_inserted_then_one_row_serves_both(engine: Engine) -> None:
    ids = insert(engine, request(idempotency_key="k"), request(), request(idempotency_key="k"))
    assert ids[0] == ids[2] != ids[1]
    assert cell(engine, "SELECT count(*) FROM jobs") == 2


def test_given_a_repeat_after_preparation_when_inserted_then_it_is_still_the_same_request(engine: Engine) -> None:
    (job_id,) = submit(engine, idempotency_key="k")
    assert insert(engine, request(idempotency_key="k")) == [job_id]


@pytest.mark.parametrize("other", [{"prompt": "another"}, {"model": "n"}, {"prompt": (1, 2)}])
def test_given_a_key_in_use_when_another_request_has_it_then_conflict(engine: Engine, other: dict[str, object]) -> None:
    insert(engine, request(idempotency_key="k"))
    with pytest.raises(Conflict, match=r"has this idempotency key and another (model|prompt);"):
        insert(engine, request(idempotency_key="k", **other))


def test_given_one_key_twice_with_other_prompts_in_a_batch_when_inserted_then_conflict(engine: Engine) -> None:
    with pytest.raises(Conflict):
        insert(engine, request(idempotency_key="k"), request(idempotency_key="k", prompt="another"))
    assert cell(engine, "SELECT count(*) FROM jobs") == 0


def test_given_what_postgres_cannot_hold_when_inserted_then_the_field_is_named(engine: Engine) -> None:
    for field, value in [("prompt", "a\0b"), ("prompt", "\ud800"), ("metadata", {"a\0": 1}), ("idempotency_key", "\0")]:
        with pytest.raises(Invalid) as caught:
            insert(engine, request(**{field: value}))
        assert caught.value.field == field
    with pytest.raises(Invalid, match="tenant"):
        insert(engine, request(tenant="nobody"))
    with pytest.raises(Invalid, match="priority is 0 to 9"):
        insert(engine, request(priority=10))


def test_given_a_rolled_back_transaction_when_read_then_nothing_was_accepted(engine: Engine) -> None:
    with engine.connect() as connection:
        jobs.insert_jobs(connection, [request()])
        connection.rollback()
    assert cell(engine, "SELECT count(*) FROM jobs") == 0


def test_given_ten_thousand_requests_when_inserted_then_one_transaction_holds_them_in_order(engine: Engine) -> None:
    began_s = time.perf_counter()
    ids = insert(engine, *(request(prompt=f"text {number}") for number in range(10_000)))
    print(f"10,000 rows: {10_000 / (time.perf_counter() - began_s):.0f} rows/s")
    assert cell(engine, "SELECT count(*) FROM jobs") == 10_000
    with engine.begin() as connection:
        assert [job.prompt for job in jobs.get_jobs(connection, ids[::999])] == [
            f"text {number}" for number in range(0, 10_000, 999)
        ]
        assert jobs.ended(connection, ids) == set()


def test_given_an_invalid_request_when_kept_as_failed_then_its_producer_can_read_why(engine: Engine) -> None:
    failed = jobs.FailedRequest(id=new_id(), model=MODEL, prompt="a\0", error=Invalid("top_p", "bad", "fix").as_dict())
    with engine.begin() as connection:
        assert jobs.insert_failed(connection, [failed]) == {failed.id}
        assert jobs.insert_failed(connection, [failed]) == set()
        job = jobs.get_job(connection, failed.id)
    assert job is not None
    assert (job.state, (job.error or {})["field"]) == (JobState.FAILED, "top_p")


def test_given_many_jobs_when_listed_by_page_then_each_comes_once_newest_first(engine: Engine) -> None:
    ids = [submit(engine)[0] for _ in range(5)]
    claim(engine, ids[:1])
    with engine.begin() as connection:
        first = listing.list_jobs(connection, limit=3)
        rest = listing.list_jobs(connection, limit=3, after=first[-1].id)
        queued = listing.list_jobs(connection, state=JobState.QUEUED, model=MODEL)
        assert listing.list_jobs(connection, model="n") == []
    assert [job.id for job in (*first, *rest)] == ids[::-1]
    assert {job.id for job in queued} == set(ids[1:])


def test_given_a_queued_job_when_cancelled_then_it_ends_at_once(engine: Engine) -> None:
    (job_id,) = submit(engine)
    with engine.begin() as connection:
        assert jobs.request_cancel(connection, [job_id, new_id()]) == {job_id: JobState.CANCELLED}
    assert claim(engine, [job_id]) == []
    with engine.begin() as connection:
        assert jobs.ended(connection, [job_id]) == {job_id}
        assert jobs.request_cancel(connection, [job_id]) == {job_id: JobState.CANCELLED}


def test_given_a_running_job_when_cancelled_then_its_head_hears_of_it(engine: Engine) -> None:
    claimed = running(engine)
    with engine.begin() as connection:
        assert jobs.request_cancel(connection, [claimed.job_id], running=False) == {claimed.job_id: JobState.RUNNING}
        reply = leases.heartbeat(connection, [_beat(claimed)], lease_s=LONG_S)
        assert not reply[claimed.job_id, claimed.fence].cancel_requested
        assert jobs.request_cancel(connection, [claimed.job_id]) == {claimed.job_id: JobState.RUNNING}
        reply = leases.heartbeat(connection, [_beat(claimed)], lease_s=LONG_S)
        assert reply[claimed.job_id, claimed.fence].cancel_requested


def test_given_a_job_in_each_state_when_its_progress_is_read_then_a_stream_can_rejoin(engine: Engine) -> None:
    claimed = running(engine)
    beat = _beat(claimed, 7, 8)
    with engine.begin() as connection:
        leases.heartbeat(connection, [beat], lease_s=LONG_S)
        (progress,) = read_progress(connection, [Asked(claimed.job_id)])
        assert progress is not None
        assert (progress.state, progress.token_ids, progress.text) == (None, (7, 8), None)
        assert progress.logprobs == beat.logprobs
        ends.release_running(connection, [(claimed.job_id, claimed.fence)])
        asked = [Asked(new_id()), Asked(claimed.job_id, claimed.fence, 1, 0), Asked(claimed.job_id, 9, 1, 0)]
        nothing, known, unknown = read_progress(connection, asked)
        assert nothing is None
        assert known is not None
        assert (known.start, known.token_ids, known.logprobs) == (1, (8,), beat.logprobs[1:])
        assert unknown is not None
        assert (unknown.state, unknown.start, unknown.token_ids) == (None, 0, (7, 8))
    (again,) = claim(engine, [claimed.job_id])
    end(engine, success(again, 7, 8, 9))
    with engine.begin() as connection:
        (done,) = read_progress(connection, [Asked(claimed.job_id)])
    assert done is not None
    assert (done.state, done.token_ids, done.text, done.finish_reason) == ("succeeded", (7, 8, 9), "done", "stop")


async def test_given_asyncio_when_the_same_functions_run_then_they_do_the_same(
    database_url: str, engine: Engine
) -> None:
    async_engine = connect_async(database_url)
    async with async_engine.begin() as connection:
        stored = await connection.run_sync(jobs.insert_jobs, [request(), request()])
        ids = [one.job_id for one in stored]
        assert await connection.run_sync(jobs.request_cancel, ids[:1]) == {ids[0]: JobState.CANCELLED}
    await async_engine.dispose()
    assert [state(engine, job_id) for job_id in ids] == [JobState.CANCELLED, JobState.QUEUED]


def test_given_readers_when_parameters_in_a_row_are_nonsense_then_the_row_stays_readable(engine: Engine) -> None:
    change(engine, """INSERT INTO jobs (model, prompt, params) VALUES ('m', 'x', '{"top_p": "much"}')""")
    with engine.begin() as connection:
        (summary,) = listing.list_jobs(connection)
        job = jobs.get_job(connection, summary.id)
        assert connection.execute(text("SELECT params FROM jobs")).scalar_one() == {"top_p": "much"}
    assert job is not None
    assert (job.prompt, job.params) == ("x", SamplingParams())


def _beat(claimed: claims.Claimed, *ids: int) -> Beat:
    logprobs = tuple(TokenLogprob(token_id, -0.5, ((token_id, -0.5),)) for token_id in ids)
    return Beat(job_id=claimed.job_id, fence=claimed.fence, start=0, ids=ids, logprobs=logprobs)
