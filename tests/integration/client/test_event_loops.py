"""One client used by event loops in turn, and by a process that was forked from the one that made
it."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.context import ForkProcess
from uuid import UUID

import pytest
from sqlalchemy import text

from shardline.base.errors import Invalid
from shardline.client import AsyncClient, Client
from shardline.contract.job import JobState
from tests.tiny_head import TinyHead, tiny_head

PROMPT = "sum: 1 + 2 ="
ANSWER = "sum: 1"
FORK = multiprocessing.get_context("fork")
BACKEND = text("SELECT pg_backend_pid()")
SERVES = text("SELECT count(*) FROM pg_stat_activity WHERE pid = :backend")


@pytest.fixture
def head(database_url: str, redis_url: str) -> Iterator[TinyHead]:
    with tiny_head(database_url, redis_url) as head, head.serving():
        yield head


async def once(client: AsyncClient) -> tuple[str, str]:
    """One job, waited for and streamed."""
    job_id = await client.submit("clerk", PROMPT, max_tokens=4)
    job = await client.wait(job_id, timeout_s=60)
    assert job.result is not None
    assert (await client.get(job_id)).state is JobState.SUCCEEDED
    assert [each.id for each in await client.list()]
    return job.result.text, "".join([delta.text async for delta in client.stream(job_id)])


@pytest.mark.usefixtures("head")
def test_a_client_works_in_one_event_loop_after_the_other(
    database_url: str, redis_url: str
) -> None:
    client = AsyncClient(database_url=database_url, redis_url=redis_url)
    for _ in range(3):
        assert asyncio.run(once(client)) == (ANSWER, ANSWER)
    asyncio.run(client.close())


@pytest.mark.usefixtures("head")
def test_a_client_that_another_running_loop_uses_says_so(database_url: str, redis_url: str) -> None:
    client = AsyncClient(database_url=database_url, redis_url=redis_url)

    async def both() -> None:
        assert await once(client) == (ANSWER, ANSWER)
        with pytest.raises(Invalid, match=r"^client: another event loop uses it"):
            await asyncio.to_thread(asyncio.run, once(client))
        assert await once(client) == (ANSWER, ANSWER), "it goes on where it was"
        await client.close()

    asyncio.run(both())


def canceled(client: Client) -> JobState:
    """Of a job that nobody need compute."""
    job_id = client.submit("clerk", PROMPT)
    client.cancel(job_id)
    return client.wait(job_id, 60, must_succeed=False).state


def in_child(client: Client, known: UUID) -> None:
    """Exits with 0 if everything works."""
    is_right = canceled(client) is JobState.CANCELLED and client.get(known).id == known
    client.close()
    os._exit(0 if is_right else 1)


def exit_codes(children: Sequence[ForkProcess]) -> list[int | None]:
    """None of one that hangs."""
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        child.kill()
    return [child.exitcode for child in children]


def test_a_fork_leaves_its_parents_connections_and_has_its_own(
    database_url: str, redis_url: str
) -> None:
    with Client(database_url=database_url, redis_url=redis_url) as client:
        assert canceled(client) is JobState.CANCELLED
        never = client.submit("clerk", PROMPT)
        with client._database.connect() as connection:
            backend = connection.scalar(BACKEND)
        # A thread that waits in the parent leads nobody in the child.
        waiting = threading.Thread(
            target=client.wait, args=(never,), kwargs={"must_succeed": False}
        )
        waiting.start()
        while not client._ends._has_leader:
            pass

        children = [FORK.Process(target=in_child, args=(client, never)) for _ in range(2)]
        assert exit_codes(children) == [0, 0]

        client.cancel(never)
        waiting.join()
        # The thread may have added a connection: any of them can answer for this one.
        with client._database.connect() as connection:
            assert connection.scalar(SERVES, {"backend": backend}) == 1, "no child has closed it"


async def canceled_async(client: AsyncClient) -> JobState:
    """The same of the client for asyncio."""
    job_id = await client.submit("clerk", PROMPT)
    await client.cancel(job_id)
    return (await client.wait(job_id, 60, must_succeed=False)).state


def in_loop_of_child(client: AsyncClient) -> None:
    """Exits with 0 if everything works."""
    os._exit(0 if asyncio.run(canceled_async(client)) is JobState.CANCELLED else 1)


def test_a_client_for_asyncio_works_in_a_fork_and_in_its_parent(
    database_url: str, redis_url: str
) -> None:
    client = AsyncClient(database_url=database_url, redis_url=redis_url)
    with asyncio.Runner() as runner:
        assert runner.run(canceled_async(client)) is JobState.CANCELLED
        assert exit_codes([FORK.Process(target=in_loop_of_child, args=(client,))]) == [0]
        assert runner.run(canceled_async(client)) is JobState.CANCELLED, (
            "no child has closed what it uses"
        )
        runner.run(client.close())
