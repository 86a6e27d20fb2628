"""The asyncio client against real Postgres and Valkey: many waiters on one connection, and outages
of both servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from uuid import UUID, uuid4

import pytest
from sqlalchemy import event, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from services.gateway.client import GatewayClient
from services.standalone.servers import Postgres, Valkey
from shardline.base.errors import Diverged, Invalid, JobCancelled, JobFailed, NotFound
from shardline.client import AsyncClient
from shardline.client.asynchronous import MAX_ROWS
from shardline.contract.job import Job, JobState
from shardline.contract.wire import Delta
from shardline.store.connection.database import connect, connect_async
from shardline.streams import Place
from tests.tiny_head import TinyHead, tiny_head

PROMPT = "sum: 1 + 2 ="


@pytest.fixture
def head(database_url: str, redis_url: str) -> Iterator[TinyHead]:
    with tiny_head(database_url, redis_url) as head:
        yield head


@pytest.fixture
async def client(database_url: str, redis_url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(database_url=database_url, redis_url=redis_url) as client:
        yield client


async def test_each_of_many_waiters_gets_its_own_job(client: AsyncClient, head: TinyHead) -> None:
    prompts = [f"sum: {number} + 1 =" for number in range(40)]
    ids = await client.submit_many({"model": "clerk", "prompt": prompt} for prompt in prompts)
    with head.serving():
        together = await client.wait(ids, 60)
        alone = await asyncio.gather(*(client.wait(job_id, 60) for job_id in ids))
    assert [job.result and job.result.text for job in together] == prompts
    assert alone == together


async def test_no_job_is_left_when_the_callers_transaction_rolls_back(client: AsyncClient) -> None:
    async with AsyncSession(client._database) as session:
        await client.submit("clerk", PROMPT, session=session)
        await session.rollback()
    assert await client.list() == []

    async with AsyncSession(client._database) as session, session.begin():
        job_id = await client.submit("clerk", PROMPT, session=session)
    assert [job.id for job in await client.list()] == [job_id]


async def test_a_session_of_a_driver_with_other_parameters_is_refused(
    client: AsyncClient, database_url: str
) -> None:
    url = make_url(database_url).set(drivername="postgresql+psycopg")
    # asyncpg's are "numeric_dollar".
    engine = create_async_engine(url, paramstyle="format")
    async with AsyncSession(engine) as session:
        with pytest.raises(Invalid, match=r"its driver is psycopg.*Use .*postgresql\+psycopg"):
            await client.submit("clerk", PROMPT, session=session)
    await engine.dispose()


async def test_concurrent_reads_share_one_connection_and_few_queries(
    client: AsyncClient, database_url: str
) -> None:
    ids = await client.submit_many({"model": "clerk", "prompt": PROMPT} for _ in range(20))
    unknown = uuid4()
    queries: list[str] = []
    pool = connect_async(database_url, pool_size=1, pool_timeout=60)
    event.listen(
        pool.sync_engine, "before_cursor_execute", lambda *arguments: queries.append(arguments[2])
    )
    async with GatewayClient(database=pool) as reader:
        asked = [reader.get(job_id, tenant="default") for job_id in ids * 20]
        others = [reader.get(ids[0], tenant="other"), reader.get(unknown)]
        found = await asyncio.gather(*asked, *others, return_exceptions=True)
    await pool.dispose()
    assert [job.id for job in found[:-2] if isinstance(job, Job)] == ids * 20
    assert [str(error) for error in found[-2:]] == [
        f"no job has the id {job_id}" for job_id in (ids[0], unknown)
    ]
    assert sum("FROM jobs" in query for query in queries) <= len(found) / MAX_ROWS + 1


async def test_submitting_a_wrong_request_names_the_field(client: AsyncClient) -> None:
    with pytest.raises(Invalid, match=r"requests\[0\].temperature"):
        await client.submit_many([{"model": "clerk", "prompt": "a", "temperature": 9}])
    with pytest.raises(Invalid, match="prompt"):
        await client.submit("clerk")


async def test_an_unknown_job_is_not_found(client: AsyncClient) -> None:
    for ask in (client.get, client.wait):
        with pytest.raises(NotFound):
            await ask(uuid4())
    with pytest.raises(NotFound):
        await anext(client.stream(uuid4()))


async def test_following_an_unknown_job_from_a_place_is_not_found(
    database_url: str, redis_url: str
) -> None:
    async with GatewayClient(database_url=database_url, redis_url=redis_url) as client:
        with pytest.raises(NotFound):
            await anext(client.reader.follow(uuid4(), after=Place(num_tokens=1, digest=None)))


async def test_waiting_for_a_job_that_never_ends_times_out(client: AsyncClient) -> None:
    job_id = await client.submit("clerk", PROMPT)
    with pytest.raises(TimeoutError):
        await client.wait(job_id, 0.05)


async def test_each_end_without_a_completion_raises_its_error(
    client: AsyncClient, head: TinyHead
) -> None:
    failing = await client.submit("clerk", PROMPT)
    head.end(head.claim(), JobState.FAILED)
    cancelled = await client.submit("clerk", PROMPT)
    assert await client.cancel(cancelled) == {cancelled: JobState.CANCELLED}
    with pytest.raises(JobFailed, match="it broke the engine"):
        await client.wait(failing, 60)
    with pytest.raises(JobCancelled):
        await client.wait(cancelled, 60)
    with pytest.raises(JobCancelled):
        _ = [delta async for delta in client.stream(cancelled)]
    jobs = await client.wait([failing, cancelled], 60, must_succeed=False)
    assert [job.state for job in jobs] == [JobState.FAILED, JobState.CANCELLED]


async def test_two_readers_of_one_job_get_every_token_once(
    client: AsyncClient, head: TinyHead
) -> None:
    job_id = await client.submit("clerk", PROMPT)
    sequence = head.claim()
    head.say(sequence, 2)
    early = client.stream(job_id)
    deltas = [await anext(early)]
    late = asyncio.create_task(_collect(client, job_id))
    head.finish(sequence)
    deltas += [delta async for delta in early]
    for found in (deltas, await late):
        assert [token_id for delta in found for token_id in delta.ids] == list(sequence.output_ids)
        assert "".join(delta.text for delta in found) == PROMPT


async def test_every_token_comes_once_when_redis_is_lost_in_the_middle(
    client: AsyncClient, head: TinyHead, redis_server: Valkey
) -> None:
    job_id = await client.submit("clerk", PROMPT)
    sequence = head.claim()
    stream = client.stream(job_id)
    head.say(sequence, 3)
    deltas = [await anext(stream)]
    redis_server.restart()
    head.say(sequence, 2, to_stream=False)
    head.beat(sequence)
    head.finish(sequence)
    deltas += [delta async for delta in stream]
    assert [token_id for delta in deltas for token_id in delta.ids] == list(sequence.output_ids)
    assert "".join(delta.text for delta in deltas) == PROMPT


async def test_a_stream_tells_its_reader_when_the_tokens_change(
    client: AsyncClient, head: TinyHead
) -> None:
    job_id = await client.submit("clerk", PROMPT)
    sequence = head.claim()
    stream = client.stream(job_id)
    head.say(sequence, 2)
    head.beat(sequence)
    head.say(sequence, 3)
    given_out = [(await anext(stream)).ids[0] for _ in range(5)]
    other = head.resume_otherwise(sequence)
    head.finish(other)
    with pytest.raises(Diverged):
        given_out += [token_id async for delta in stream for token_id in delta.ids]
    assert tuple(given_out) == sequence.output_ids[:5]
    assert (
        tuple(token_id for delta in await _collect(client, job_id) for token_id in delta.ids)
        == other.output_ids
    )


async def test_rows_of_many_followed_jobs_are_read_together_without_redis(
    client: AsyncClient, head: TinyHead, redis_server: Valkey
) -> None:
    ids = await client.submit_many({"model": "clerk", "prompt": PROMPT} for _ in range(100))
    sequences = head.claim_all()
    redis_server.kill()
    readers = [asyncio.create_task(_collect(client, job_id)) for job_id in ids]
    for sequence in sequences:
        head.say(sequence, 2, to_stream=False)
        head.beat(sequence)
        head.say(sequence, len(sequence.output_ids) - 2, to_stream=False)
        head.end(sequence, to_stream=False)
    for deltas in await asyncio.gather(*readers):
        assert [token_id for delta in deltas for token_id in delta.ids] == list(
            sequences[0].output_ids
        )
        assert "".join(delta.text for delta in deltas) == PROMPT
    redis_server.restart()


async def test_waiting_goes_on_after_a_restart_of_postgres(
    client: AsyncClient, head: TinyHead, postgres_server: Postgres
) -> None:
    job_id = await client.submit("clerk", PROMPT)
    waiting = asyncio.create_task(client.wait(job_id, 60))
    await anext(client._reader.follow(job_id))
    postgres_server.restart()
    head.database.dispose()
    head.finish(head.claim())
    assert (await waiting).state is JobState.SUCCEEDED


async def _collect(client: AsyncClient, job_id: UUID) -> list[Delta]:
    return [delta async for delta in client.stream(job_id)]


async def test_a_job_is_accepted_at_once_while_list_queries_hang(
    client: AsyncClient, database_url: str
) -> None:
    blocker = connect(database_url)
    with blocker.connect() as connection:
        connection.execute(text("LOCK TABLE results IN ACCESS EXCLUSIVE MODE"))
        lists = [asyncio.create_task(client.list()) for _ in range(8)]
        waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
        with blocker.connect() as watch:
            while not watch.scalar(waiting):
                await asyncio.wait(lists, timeout=0.01)
        await client.submit("clerk", PROMPT)
        assert not any(task.done() for task in lists)
    await asyncio.gather(*lists)
    blocker.dispose()
