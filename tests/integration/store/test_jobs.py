"""The doors' statements on a real Postgres: insert, repeat, read, list, cancel."""

from __future__ import annotations

import time
from uuid import UUID

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import IntegrityError

from shardline.base.errors import Conflict, Invalid
from shardline.contract.chat import Message
from shardline.contract.ids import new_id
from shardline.contract.job import JobRequest, JobState, SamplingParams, TokenLogprob
from shardline.store import jobs, listing
from shardline.store.connection.database import connect_async
from shardline.store.progress import ProgressQuestion, read_progress
from shardline_server.store import claims, ends, leases
from shardline_server.store.leases import Beat
from tests.integration.rows import (
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
)


def insert(engine: Engine, *requests: JobRequest) -> list[UUID]:
    """In a transaction of its own."""
    with engine.begin() as connection:
        return [one.job_id for one in jobs.insert_jobs(connection, requests)]


def test_requests_of_every_kind_read_back_as_they_were(engine: Engine) -> None:
    messages = (Message(role="user", content="ä\nhi"),)
    chat = request(
        prompt=None,
        messages=messages,
        metadata={"a": [1, {"b": None}]},
        priority=0,
        temperature=0.5,
    )
    ids = insert(engine, request(seed=7, max_tokens=3), chat, request(prompt=(1, 2, 3)))
    with engine.begin() as connection:
        plain, talked, by_ids = jobs.get_jobs(connection, ids)
    assert (plain.prompt, plain.seed, plain.params.max_tokens, plain.state) == (
        "text",
        7,
        3,
        JobState.QUEUED,
    )
    assert (talked.metadata, talked.priority, talked.params.temperature) == (
        {"a": [1, {"b": None}]},
        0,
        0.5,
    )
    assert by_ids.prompt_token_ids == (1, 2, 3)
    assert cell(engine, "SELECT messages FROM jobs WHERE id = :id", id=ids[1]) == [
        {"role": "user", "content": "ä\nhi"}
    ]


def test_each_row_without_a_seed_draws_its_own(engine: Engine) -> None:
    submit(engine, 20)
    assert cell(engine, "SELECT count(DISTINCT seed) FROM jobs") == 20


def test_two_columns_are_enough_for_plain_sql(engine: Engine) -> None:
    change(engine, "INSERT INTO jobs (model, prompt) VALUES ('m', 'text')")
    assert (
        cell(engine, "SELECT state || ' ' || tenant_id || ' ' || (seed >= 0) FROM jobs")
        == "queued default true"
    )


@pytest.mark.parametrize(
    ("columns", "values", "constraint"),
    [
        ("model", "'m'", "jobs_needs_a_prompt_or_messages_or_prompt_ids"),
        (
            "model, prompt, messages",
            "'m', 'x', '[]'",
            "jobs_needs_a_prompt_or_messages_or_prompt_ids",
        ),
        ("model, messages", "'m', '{}'", "jobs_messages_is_an_array"),
        ("model, prompt, params", "'m', 'x', '[1]'", "jobs_params_is_an_object"),
        ("model, prompt, priority", "'m', 'x', 10", "jobs_priority_is_0_to_9"),
        ("model, prompt, state", "'m', 'x', 'going'", "jobs_state_is_known"),
        ("model, prompt, state", "'m', 'x', 'running'", "jobs_a_lease_belongs_to_running"),
        ("model, prompt, state", "'m', 'x', 'succeeded'", "jobs_finished_at_belongs_to_an_end"),
        ("model, prompt, prepared_at", "'m', 'x', now()", "jobs_prepared_means_tokenized"),
        ("model, prompt", "'', 'x'", "jobs_model_is_1_to_256_characters"),
    ],
)
def test_a_constraint_names_what_is_wrong_with_a_row_by_hand(
    engine: Engine, columns: str, values: str, constraint: str
) -> None:
    with pytest.raises(IntegrityError, match=constraint):
        change(engine, f"INSERT INTO jobs ({columns}) VALUES ({values})")


def test_inserting_a_known_id_or_key_returns_the_first_job(engine: Engine) -> None:
    job_id = new_id()
    first, keyed = insert(engine, request(id=job_id), request(idempotency_key="k"))
    assert insert(
        engine, request(id=job_id), request(idempotency_key="k"), request(idempotency_key="k")
    ) == [
        job_id,
        keyed,
        keyed,
    ]
    assert first == job_id
    assert cell(engine, "SELECT count(*) FROM jobs") == 2


def test_one_key_twice_in_a_batch_is_one_row(engine: Engine) -> None:
    ids = insert(engine, request(idempotency_key="k"), request(), request(idempotency_key="k"))
    assert ids[0] == ids[2] != ids[1]
    assert cell(engine, "SELECT count(*) FROM jobs") == 2


def test_a_repeat_after_preparation_is_still_the_same_request(engine: Engine) -> None:
    (job_id,) = submit(engine, idempotency_key="k")
    assert insert(engine, request(idempotency_key="k")) == [job_id]


@pytest.mark.parametrize("other", [{"prompt": "another"}, {"model": "n"}, {"prompt": (1, 2)}])
def test_another_request_with_a_key_in_use_is_a_conflict(
    engine: Engine, other: dict[str, object]
) -> None:
    insert(engine, request(idempotency_key="k"))
    with pytest.raises(Conflict, match=r"has this idempotency key and another (model|prompt);"):
        insert(engine, request(idempotency_key="k", **other))


def test_one_key_twice_in_a_batch_with_other_prompts_is_a_conflict(engine: Engine) -> None:
    with pytest.raises(Conflict):
        insert(engine, request(idempotency_key="k"), request(idempotency_key="k", prompt="another"))
    assert cell(engine, "SELECT count(*) FROM jobs") == 0


def test_a_value_that_postgres_cannot_hold_names_the_field(engine: Engine) -> None:
    for field, value in [
        ("prompt", "a\0b"),
        ("prompt", "\ud800"),
        ("metadata", {"a\0": 1}),
        ("idempotency_key", "\0"),
    ]:
        with pytest.raises(Invalid) as caught:
            insert(engine, request(**{field: value}))
        assert caught.value.field == field
    with pytest.raises(Invalid, match="tenant"):
        insert(engine, request(tenant="nobody"))
    with pytest.raises(Invalid, match="priority is 0 to 9"):
        insert(engine, request(priority=10))


def test_a_rolled_back_transaction_accepts_nothing(engine: Engine) -> None:
    with engine.connect() as connection:
        jobs.insert_jobs(connection, [request()])
        connection.rollback()
    assert cell(engine, "SELECT count(*) FROM jobs") == 0


def test_one_transaction_stores_ten_thousand_requests_in_order(engine: Engine) -> None:
    began_s = time.perf_counter()
    ids = insert(engine, *(request(prompt=f"text {number}") for number in range(10_000)))
    print(f"10,000 rows: {10_000 / (time.perf_counter() - began_s):.0f} rows/s")
    assert cell(engine, "SELECT count(*) FROM jobs") == 10_000
    with engine.begin() as connection:
        assert [job.prompt for job in jobs.get_jobs(connection, ids[::999])] == [
            f"text {number}" for number in range(0, 10_000, 999)
        ]
        assert jobs.ended(connection, ids) == set()


def test_the_producer_of_a_kept_invalid_request_reads_why(engine: Engine) -> None:
    failed = jobs.FailedRequest(
        id=new_id(), model=MODEL, prompt="a\0", error=Invalid("top_p", "bad", "fix").as_dict()
    )
    with engine.begin() as connection:
        assert jobs.insert_failed(connection, [failed]) == {failed.id}
        assert jobs.insert_failed(connection, [failed]) == set()
        job = jobs.get_job(connection, failed.id)
    assert job is not None
    assert (job.state, (job.error or {})["field"]) == (JobState.FAILED, "top_p")


def test_each_job_is_listed_once_newest_first_over_pages(engine: Engine) -> None:
    ids = [submit(engine)[0] for _ in range(5)]
    claim(engine, ids[:1])
    with engine.begin() as connection:
        first = listing.list_jobs(connection, limit=3)
        rest = listing.list_jobs(connection, limit=3, after=first[-1].id)
        queued = listing.list_jobs(connection, state=JobState.QUEUED, model=MODEL)
        assert listing.list_jobs(connection, model="n") == []
    assert [job.id for job in (*first, *rest)] == ids[::-1]
    assert {job.id for job in queued} == set(ids[1:])


def test_a_cancelled_queued_job_ends_at_once(engine: Engine) -> None:
    (job_id,) = submit(engine)
    with engine.begin() as connection:
        assert jobs.request_cancel(connection, [job_id, new_id()]) == {job_id: JobState.CANCELLED}
    assert claim(engine, [job_id]) == []
    with engine.begin() as connection:
        gone = new_id()
        assert jobs.ended(connection, [job_id, gone]) == {job_id, gone}
        assert jobs.request_cancel(connection, [job_id]) == {job_id: JobState.CANCELLED}


def test_the_head_of_a_running_job_hears_of_its_cancel(engine: Engine) -> None:
    claimed = running(engine)
    with engine.begin() as connection:
        assert jobs.request_cancel(connection, [claimed.job_id], running=False) == {
            claimed.job_id: JobState.RUNNING
        }
        reply = leases.heartbeat(connection, [_beat(claimed)], lease_s=LONG_S)
        assert not reply[claimed.job_id, claimed.fence].cancel_requested
        assert jobs.request_cancel(connection, [claimed.job_id]) == {
            claimed.job_id: JobState.RUNNING
        }
        reply = leases.heartbeat(connection, [_beat(claimed)], lease_s=LONG_S)
        assert reply[claimed.job_id, claimed.fence].cancel_requested


def test_a_stream_can_rejoin_from_the_progress_of_any_state(engine: Engine) -> None:
    claimed = running(engine)
    beat = _beat(claimed, 7, 8)
    with engine.begin() as connection:
        leases.heartbeat(connection, [beat], lease_s=LONG_S)
        (progress,) = read_progress(connection, [ProgressQuestion(claimed.job_id)])
        assert progress is not None
        assert (progress.state, progress.token_ids, progress.text) == (None, (7, 8), None)
        assert progress.logprobs == beat.logprobs
        ends.release_running(connection, [(claimed.job_id, claimed.fence)])
        asked = [
            ProgressQuestion(new_id()),
            ProgressQuestion(claimed.job_id, claimed.fence, 1, 0),
            ProgressQuestion(claimed.job_id, 9, 1, 0),
        ]
        nothing, known, unknown = read_progress(connection, asked)
        assert nothing is None
        assert known is not None
        assert (known.start, known.token_ids, known.logprobs) == (1, (8,), beat.logprobs[1:])
        assert unknown is not None
        assert (unknown.state, unknown.start, unknown.token_ids) == (None, 0, (7, 8))
    (again,) = claim(engine, [claimed.job_id])
    end(engine, success(again, 7, 8, 9))
    with engine.begin() as connection:
        (done,) = read_progress(connection, [ProgressQuestion(claimed.job_id)])
    assert done is not None
    assert (done.state, done.token_ids, done.text, done.finish_reason) == (
        "succeeded",
        (7, 8, 9),
        "done",
        "stop",
    )


@pytest.mark.parametrize("num_prompt", [1, 15, 16, 17, 40])
def test_progress_has_the_end_of_the_prompt_where_it_is_asked_for(
    engine: Engine, num_prompt: int
) -> None:
    ids = tuple(range(num_prompt))
    claimed = running(engine)
    change(engine, "UPDATE jobs SET prompt_ids = :ids", ids=list(ids))

    with engine.begin() as connection:
        asked = [
            ProgressQuestion(claimed.job_id),
            ProgressQuestion(claimed.job_id, with_prompt_end=True),
        ]
        without, found = read_progress(connection, asked)

    assert without is not None
    assert without.prompt_end == ()
    assert found is not None
    assert found.prompt_end == ids[-16:]


async def test_the_same_functions_run_under_asyncio(database_url: str, engine: Engine) -> None:
    async_engine = connect_async(database_url)
    async with async_engine.begin() as connection:
        stored = await connection.run_sync(jobs.insert_jobs, [request(), request()])
        ids = [one.job_id for one in stored]
        assert await connection.run_sync(jobs.request_cancel, ids[:1]) == {
            ids[0]: JobState.CANCELLED
        }
    await async_engine.dispose()
    assert [state(engine, job_id) for job_id in ids] == [JobState.CANCELLED, JobState.QUEUED]


def test_a_row_with_nonsense_parameters_stays_readable(engine: Engine) -> None:
    change(
        engine,
        """INSERT INTO jobs (model, prompt, params) VALUES ('m', 'x', '{"top_p": "much"}')""",
    )
    with engine.begin() as connection:
        (summary,) = listing.list_jobs(connection)
        job = jobs.get_job(connection, summary.id)
        assert connection.execute(text("SELECT params FROM jobs")).scalar_one() == {"top_p": "much"}
    assert job is not None
    assert (job.prompt, job.params) == ("x", SamplingParams())


def _beat(claimed: claims.ClaimedJob, *ids: int) -> Beat:
    logprobs = tuple(TokenLogprob(token_id, -0.5, ((token_id, -0.5),)) for token_id in ids)
    return Beat(job_id=claimed.job_id, fence=claimed.fence, start=0, ids=ids, logprobs=logprobs)
