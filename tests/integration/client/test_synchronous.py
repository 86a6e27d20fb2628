"""The client against real Postgres and Valkey: accepted means committed, and no token comes twice
or never."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, cast
from uuid import UUID, uuid4

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from services.standalone.servers import Valkey
from shardline.base.errors import (
    Conflict,
    Diverged,
    Invalid,
    JobCancelled,
    JobExpired,
    JobFailed,
    NotFound,
    Unavailable,
)
from shardline.client import Client
from shardline.contract.job import JobState
from shardline.store.listing import PageEnd
from tests.tiny_head import TinyHead, tiny_head

PROMPT = "sum: 1 + 2 ="


@pytest.fixture
def client(database_url: str, redis_url: str) -> Iterator[Client]:
    with Client(database_url=database_url, redis_url=redis_url) as client:
        yield client


@pytest.fixture
def head(database_url: str, redis_url: str) -> Iterator[TinyHead]:
    with tiny_head(database_url, redis_url) as head:
        yield head


def num_jobs(client: Client) -> int:
    with client._database.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM jobs")).scalar_one())


def test_a_result_has_text_tokens_and_usage(client: Client, head: TinyHead) -> None:
    job_id = client.submit("clerk", PROMPT, max_tokens=4, metadata={"order": 7})
    with head.serving():
        job = client.wait(job_id, 60)
    assert job.state is JobState.SUCCEEDED
    assert job.result is not None
    assert job.result.text == "sum: 1"
    assert len(job.result.token_ids) == job.result.usage.completion_tokens == 4
    assert job.metadata == {"order": 7}


def test_token_ids_and_messages_run(client: Client, head: TinyHead) -> None:
    ids = [
        client.submit("clerk", [1, 20, 21]),
        client.submit("clerk", messages=[{"role": "user", "content": PROMPT}]),
    ]
    with head.serving():
        first, second = client.wait(ids, 60)
    assert first.result is not None
    assert first.result.token_ids == (20, 21, 2)
    assert second.result is not None
    assert second.result.text == PROMPT


class SafeText(str):
    """As templates and arrays of other libraries give."""


def test_texts_of_kinds_of_their_own_are_texts(client: Client, head: TinyHead) -> None:
    one = SafeText("one")
    model = SafeText("m")
    role = SafeText("user")
    own = {"model": model, "idempotency_key": SafeText("k"), "stop": [SafeText("x")]}
    job_ids = client.submit_many(
        [{**own, "prompt": one}, {"model": model, "messages": [{"role": role, "content": one}]}]
    )
    prompt, chat = client.get_many(job_ids)
    assert (prompt.model, prompt.prompt, prompt.params.stop) == ("m", "one", ("x",))
    assert chat.model == "m"


def test_ten_thousand_prompts_in_one_call_are_stored_in_order(client: Client) -> None:
    ids = client.submit_many({"model": "clerk", "prompt": f"sum: {n} + 1 ="} for n in range(10_000))
    assert len(set(ids)) == num_jobs(client) == 10_000
    assert client.get(ids[1234]).prompt == "sum: 1234 + 1 ="


def test_one_wrong_request_among_many_stores_none(client: Client) -> None:
    with pytest.raises(Invalid) as caught:
        client.submit_many(
            [{"model": "clerk", "prompt": "a"}, {"model": "clerk", "prompt": "a", "top_p": 2}]
        )
    assert caught.value.field == "requests[1].top_p"
    assert num_jobs(client) == 0


def test_wrong_requests_among_many_are_skipped_where_the_caller_says_so(client: Client) -> None:
    one: dict[str, Any] = {"model": "clerk", "prompt": "a", "idempotency_key": "k"}
    requests: list[dict[str, Any]] = [
        one,
        {"model": "clerk", "prompt": "a", "top_p": 2},
        {**one, "prompt": "b"},
        {"model": "clerk", "prompt": "a", "tenant": "nobody"},
        {"model": "clerk", "prompt": "c"},
    ]
    first, wrong, other, foreign, last = client.submit_many(requests, on_error="skip")
    assert [isinstance(each, UUID) for each in (first, last)] == [True, True]
    assert isinstance(other, Conflict)
    assert [each.field for each in (wrong, foreign) if isinstance(each, Invalid)] == [
        "top_p",
        "tenant",
    ]
    assert num_jobs(client) == 2
    choices = client.submit_many([requests[4], requests[1]], n=2, on_error="skip")
    assert [isinstance(each, Invalid) for each in choices] == [False, False, True, True]
    assert client.submit_many([], on_error="skip") == []
    with pytest.raises(Invalid):
        client.submit_many([one], on_error=cast(Literal["skip"], "ignore"))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a", "temprature": 1}, "temprature"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "id": "x"}, "id"),
        ({"prompt": "a\0b"}, "prompt"),
        ({"prompt": "a", "tenant": "nobody"}, "tenant"),
    ],
)
def test_submitting_a_wrong_request_names_its_field(
    client: Client, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(Invalid) as caught:
        client.submit("clerk", **fields)
    assert caught.value.field == field
    assert num_jobs(client) == 0


def test_no_job_is_left_when_the_callers_transaction_rolls_back(client: Client) -> None:
    with Session(client._database) as session:
        client.submit("clerk", PROMPT, session=session)
        session.rollback()
    assert num_jobs(client) == 0

    with Session(client._database) as session, session.begin():
        job_id = client.submit("clerk", PROMPT, session=session)
        assert num_jobs(client) == 0
    assert client.get(job_id).state is JobState.QUEUED


def test_a_session_of_another_driver_is_refused_before_any_sql(client: Client) -> None:
    engine = create_engine("sqlite://")
    with Session(engine) as session, pytest.raises(Invalid) as caught:
        client.submit("clerk", PROMPT, session=session)
    assert (caught.value.field, caught.value.problem) == ("session", "its driver is pysqlite")
    engine.dispose()


def test_repeating_an_id_or_key_inserts_nothing(client: Client) -> None:
    own = uuid4()
    assert client.submit("clerk", PROMPT, id=own, idempotency_key="k") == own
    assert client.submit("clerk", PROMPT, id=own) == own
    assert client.submit("clerk", PROMPT, idempotency_key="k") == own
    with pytest.raises(Conflict):
        client.submit("clerk", "another", id=own)
    assert num_jobs(client) == 1


def test_a_chat_repeated_with_its_id_is_the_same_job(client: Client) -> None:
    own = uuid4()
    messages = [{"role": "system", "content": "brief"}, {"role": "user", "content": PROMPT}]
    assert [client.submit("clerk", messages=messages, id=own, temperature=0) for _ in "ab"] == [
        own,
        own,
    ]
    assert num_jobs(client) == 1


def test_a_waiter_is_told_of_a_cancelled_job(client: Client) -> None:
    job_id = client.submit("clerk", PROMPT)
    assert client.cancel(job_id) == {job_id: JobState.CANCELLED}
    with pytest.raises(JobCancelled):
        client.wait(job_id, 60)
    assert client.wait(job_id, 60, must_succeed=False).state is JobState.CANCELLED


def test_waiting_for_a_failed_job_raises_its_reason(client: Client, head: TinyHead) -> None:
    job_id = client.submit("clerk", PROMPT)
    head.end(head.claim(), JobState.FAILED)
    with pytest.raises(JobFailed, match="it broke the engine"):
        client.wait(job_id, 60)
    with pytest.raises(JobFailed, match="it broke the engine"):
        list(client.stream(job_id))


def test_waiting_for_a_job_that_never_ends_times_out(client: Client) -> None:
    job_id = client.submit("clerk", PROMPT)
    with pytest.raises(TimeoutError, match="1 jobs"):
        client.wait(job_id, 0.05)


def test_an_unknown_job_is_not_found(client: Client) -> None:
    for ask in (client.get, client.wait, lambda job_id: list(client.stream(job_id))):
        with pytest.raises(NotFound):
            ask(uuid4())


def test_waiting_for_an_unknown_id_names_it(client: Client) -> None:
    job_id = client.submit("clerk", PROMPT)
    unknown = uuid4()
    with pytest.raises(NotFound, match=str(unknown)):
        client.wait([job_id, job_id, unknown], 60)
    client.cancel(job_id)
    assert [job.id for job in client.wait([job_id, job_id], 60, must_succeed=False)] == [
        job_id,
        job_id,
    ]


def test_jobs_are_listed_newest_first_by_pages(client: Client) -> None:
    ids = [client.submit("clerk", PROMPT) for _ in range(5)]
    client.cancel(ids[0])
    page = client.list(limit=2)
    rest = client.list(limit=10, after=page[-1].id)
    assert [job.id for job in (*page, *rest)] == ids[::-1]
    assert [job.id for job in client.list(state=JobState.CANCELLED)] == [ids[0]]
    assert client.list(model="other") == []


def test_a_page_token_outlives_its_deleted_job_and_a_deleted_id_is_refused(client: Client) -> None:
    ids = [client.submit("clerk", PROMPT) for _ in range(4)]
    page = client.list(limit=2)
    with client._database.begin() as connection:
        connection.execute(text("DELETE FROM jobs WHERE id = :id"), {"id": page[-1].id})
    end = PageEnd.of(page)
    assert [job.id for job in client.list(after=end)] == ids[1::-1]
    assert end == PageEnd.parse(str(end))
    assert PageEnd.of(client.list(model="other")) is None
    for read in (client.list, client.list_dead):
        with pytest.raises(Invalid, match=f"after: no job in this list has the id {page[-1].id}"):
            read(after=page[-1].id)


def test_tokens_are_streamed_as_they_are_made(client: Client, head: TinyHead) -> None:
    job_id = client.submit("clerk", PROMPT)
    sequence = head.claim()
    stream = client.stream(job_id)
    head.say(sequence, 2)
    first = next(stream)
    head.finish(sequence)
    deltas = [first, *stream]
    assert [token_id for delta in deltas for token_id in delta.ids] == list(sequence.output_ids)
    assert "".join(delta.text for delta in deltas) == PROMPT
    assert (deltas[-1].state, deltas[-1].finish_reason) == ("succeeded", "stop")


@pytest.mark.parametrize(
    ("state", "error"),
    [
        (JobState.FAILED, JobFailed),
        (JobState.CANCELLED, JobCancelled),
        (JobState.EXPIRED, JobExpired),
    ],
)
def test_a_live_stream_raises_when_the_job_ends_without_a_completion(
    client: Client, head: TinyHead, state: JobState, error: type[Exception]
) -> None:
    job_id = client.submit("clerk", PROMPT)
    sequence = head.claim()
    stream = client.stream(job_id)
    head.say(sequence, 2)
    assert next(stream).ids == sequence.output_ids[:1]
    head.end(sequence, state)
    with pytest.raises(error):
        list(stream)


def test_a_stream_tells_its_reader_when_the_tokens_change_and_may_restart(
    client: Client, head: TinyHead
) -> None:
    job_id = client.submit("clerk", PROMPT)
    sequence = head.claim()
    stream = client.stream(job_id)
    head.say(sequence, 2)
    head.beat(sequence)
    head.say(sequence, 3)
    given_out = [next(stream).ids[0] for _ in range(5)]
    other = head.resume_otherwise(sequence)
    head.finish(other)
    with pytest.raises(Diverged):
        given_out += [token_id for delta in stream for token_id in delta.ids]
    assert tuple(given_out) == sequence.output_ids[:5]
    anew = list(client.stream(job_id))
    assert tuple(token_id for delta in anew for token_id in delta.ids) == other.output_ids
    assert (
        "".join(delta.text for delta in anew)
        == (client.wait(job_id, 60).result or pytest.fail("no result")).text
    )


def test_every_token_comes_once_when_redis_is_lost_in_the_middle(
    client: Client, head: TinyHead, redis_server: Valkey
) -> None:
    job_id = client.submit("clerk", PROMPT)
    sequence = head.claim()
    stream = client.stream(job_id)
    head.say(sequence, 3)
    deltas = [next(stream) for _ in range(3)]
    redis_server.restart()
    head.say(sequence, 2, to_stream=False)
    head.say(sequence, 1)
    head.beat(sequence)
    head.finish(sequence)
    deltas += stream
    assert [token_id for delta in deltas for token_id in delta.ids] == list(sequence.output_ids)
    assert "".join(delta.text for delta in deltas) == PROMPT


def test_postgres_streams_everything_without_redis(
    database_url: str, head: TinyHead, redis_server: Valkey
) -> None:
    with Client(database_url=database_url, redis_url="redis://127.0.0.1:1/0") as client:
        job_id = client.submit("clerk", PROMPT)
        sequence = head.claim()
        stream = client.stream(job_id)
        head.say(sequence, 2)
        head.beat(sequence)
        first = next(stream)
        assert first.ids == sequence.output_ids[:2]
        head.finish(sequence)
        assert first.text + "".join(delta.text for delta in stream) == PROMPT


def test_an_ended_job_is_streamed_whole(
    client: Client, head: TinyHead, redis_server: Valkey
) -> None:
    job_id = client.submit("clerk", PROMPT)
    head.finish(head.claim())
    redis_server.restart()
    (delta,) = client.stream(job_id)
    assert (delta.text, delta.state) == (PROMPT, "succeeded")


def test_threads_that_share_a_client_get_their_own_jobs(client: Client, head: TinyHead) -> None:
    def ask(number: int) -> tuple[UUID, str]:
        job_id = client.submit("clerk", f"sum: {number} + 1 =")
        job = client.wait(job_id, 60)
        assert job.result is not None
        return job_id, job.result.text

    with head.serving(), ThreadPoolExecutor(4) as threads:
        answers = dict(threads.map(ask, range(12)))
    assert sorted(answers.values()) == sorted(f"sum: {number} + 1 =" for number in range(12))


def test_submitting_without_postgres_says_that_it_is_away(redis_url: str) -> None:
    address = "postgresql://nobody@127.0.0.1:1/none"
    with (
        Client(database_url=address, redis_url=redis_url) as client,
        pytest.raises(Unavailable, match="Postgres"),
    ):
        client.submit("clerk", PROMPT)


def test_submitting_to_a_read_only_postgres_says_so(
    client: Client, database_url: str, redis_url: str
) -> None:
    with client._database.begin() as connection:
        name = connection.execute(text("SELECT current_database()")).scalar_one()
        connection.execute(text(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on'))
    with (
        Client(database_url=database_url, redis_url=redis_url) as late,
        pytest.raises(Unavailable, match="no writes"),
    ):
        late.submit("clerk", PROMPT)
