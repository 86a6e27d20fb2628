"""Waiting for many jobs at once: one listening connection for each client, whoever waits, and none
when nobody does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from uuid import UUID, uuid4

import psycopg
import pytest

from shardline.base.errors import NotFound
from shardline.client import AsyncClient, Client
from shardline.client.ends import SyncEnds
from shardline.contract.job import JobState
from shardline.contract.tables import DONE_CHANNEL
from shardline.contract.wire import Delta
from shardline.store.connection.database_url import libpq_parameters
from tests.tiny_head import TinyHead, tiny_head

PROMPT = "sum: 1 + 2 ="
NUM_WAITING = 12
NEVER_S = 600.0
LISTENING = """SELECT pid FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND query = %s"""


@pytest.fixture
def head(database_url: str, redis_url: str) -> Iterator[TinyHead]:
    with tiny_head(database_url, redis_url) as head:
        yield head


class Server:
    """Postgres, as its operator sees it."""

    def __init__(self, connection: psycopg.Connection[tuple[int]]) -> None:
        self._connection = connection

    def listeners(self) -> set[int]:
        """Processes that listen for ends of jobs."""
        return {
            pid for (pid,) in self._connection.execute(LISTENING, (f'LISTEN "{DONE_CHANNEL}"',))
        }

    def cut(self, pids: set[int]) -> None:
        """End these connections."""
        for pid in pids:
            self._connection.execute("SELECT pg_terminate_backend(%s)", (pid,))

    def until_others_listen(self, before: set[int]) -> set[int]:
        """Processes that were not there before; pytest's timeout ends what never comes."""
        while not (found := self.listeners() - before):
            pass
        return found


@pytest.fixture
def server(database_url: str) -> Iterator[Server]:
    with psycopg.connect(**libpq_parameters(database_url), autocommit=True) as connection:
        yield Server(connection)


def run_all(head: TinyHead, ids: Sequence[UUID]) -> None:
    """These jobs to their ends."""
    for sequence in head.claim_all():
        assert sequence.claimed.job_id in ids
        head.finish(sequence)


def test_one_listener_serves_all_waiting_threads_after_its_connection_is_cut(
    database_url: str, redis_url: str, head: TinyHead, server: Server
) -> None:
    with (
        Client(database_url=database_url, redis_url=redis_url) as client,
        ThreadPoolExecutor(NUM_WAITING) as threads,
    ):
        ids = [client.submit("clerk", PROMPT) for _ in range(NUM_WAITING)]
        waiting = [threads.submit(client.wait, job_id, 60) for job_id in ids]
        while len(client._ends._waits) < NUM_WAITING:
            server.listeners()
        first = server.until_others_listen(set())
        server.cut(first)
        second = server.until_others_listen(first)
        run_all(head, ids)
        jobs = [future.result() for future in waiting]
    assert (len(first), len(second)) == (1, 1)
    assert [(job.id, job.state) for job in jobs] == [(job_id, JobState.SUCCEEDED) for job_id in ids]
    assert not client._ends._waits


async def test_one_listener_serves_all_waiting_tasks_after_its_connection_is_cut(
    database_url: str, redis_url: str, head: TinyHead, server: Server
) -> None:
    async with AsyncClient(database_url=database_url, redis_url=redis_url) as client:
        ids = await client.submit_many(
            {"model": "clerk", "prompt": PROMPT} for _ in range(NUM_WAITING)
        )
        waiting = [asyncio.create_task(client.wait(job_id, 60)) for job_id in ids]
        first = await asyncio.to_thread(server.until_others_listen, set())
        server.cut(first)
        second = await asyncio.to_thread(server.until_others_listen, first)
        run_all(head, ids)
        jobs = await asyncio.gather(*waiting)
    assert (len(first), len(second)) == (1, 1)
    assert [(job.id, job.state) for job in jobs] == [(job_id, JobState.SUCCEEDED) for job_id in ids]


def test_nobody_listens_once_the_last_waiter_has_left(
    database_url: str, redis_url: str, head: TinyHead, server: Server
) -> None:
    with Client(database_url=database_url, redis_url=redis_url) as client:
        job_id = client.submit("clerk", PROMPT)
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(client.wait, job_id, 60)
            server.until_others_listen(set())
            run_all(head, [job_id])
            assert waiting.result().state is JobState.SUCCEEDED
        while server.listeners():
            pass


def test_the_next_waiter_hears_the_bell_when_the_listener_leaves(
    database_url: str, server: Server
) -> None:
    ended: set[UUID] = set()
    first = uuid4()
    second = uuid4()
    ends = SyncEnds(ended.intersection, database_url, poll_s=NEVER_S)
    with ThreadPoolExecutor(2) as threads:
        leader = threads.submit(ends.wait, [first], None)
        server.until_others_listen(set())
        follower = threads.submit(ends.wait, [second], None)
        while len(ends._waits) < 2:
            server.listeners()
        for job_id, waiting in ((first, leader), (second, follower)):
            ended.add(job_id)
            ring(database_url)
            waiting.result()


def test_one_bell_makes_one_query_for_all_waiters(database_url: str, server: Server) -> None:
    looks: list[int] = []
    ids = [uuid4() for _ in range(NUM_WAITING)]
    over = Event()

    def ended(asked: Sequence[UUID]) -> Sequence[UUID]:
        found = asked if over.is_set() else ()
        looks.append(len(asked))
        return found

    ends = SyncEnds(ended, database_url, poll_s=NEVER_S)
    with ThreadPoolExecutor(NUM_WAITING) as threads:
        waiting = [threads.submit(ends.wait, [job_id], None) for job_id in ids]
        # each its own first, the leader's first, and the one after LISTEN
        while len(looks) < NUM_WAITING + 2:
            server.listeners()
        over.set()
        ring(database_url)
        for future in waiting:
            future.result()
    assert looks[-1] == NUM_WAITING
    assert len(looks) <= NUM_WAITING + 4


def delete(database_url: str, job_id: UUID) -> None:
    """As an operator does by hand."""
    with psycopg.connect(**libpq_parameters(database_url), autocommit=True) as connection:
        connection.execute("DELETE FROM jobs WHERE id = %s", (job_id,))


def test_a_thread_that_waits_for_a_deleted_job_gets_not_found(
    database_url: str, redis_url: str, head: TinyHead, server: Server
) -> None:
    with (
        Client(database_url=database_url, redis_url=redis_url) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        kept, deleted = (client.submit("clerk", PROMPT) for _ in range(2))
        waiting = threads.submit(client.wait, [kept, deleted], NEVER_S)
        server.until_others_listen(set())
        delete(database_url, deleted)
        run_all(head, [kept])
        with pytest.raises(NotFound, match=str(deleted)):
            waiting.result()


async def first_delta(client: AsyncClient, job_id: UUID) -> Delta:
    return await anext(client.stream(job_id))


async def test_tasks_that_wait_for_a_deleted_job_get_not_found(
    database_url: str, redis_url: str, head: TinyHead, server: Server
) -> None:
    async with AsyncClient(database_url=database_url, redis_url=redis_url) as client:
        kept, deleted = [await client.submit("clerk", PROMPT) for _ in range(2)]
        waiting = asyncio.create_task(client.wait([kept, deleted], NEVER_S))
        streaming = asyncio.create_task(first_delta(client, deleted))
        await asyncio.to_thread(server.until_others_listen, set())
        delete(database_url, deleted)
        run_all(head, [kept])
        with pytest.raises(NotFound, match=str(deleted)):
            await waiting
        with pytest.raises(NotFound, match=str(deleted)):
            await streaming


def ring(database_url: str) -> None:
    """As the end of some job does."""
    with psycopg.connect(**libpq_parameters(database_url), autocommit=True) as connection:
        connection.execute("SELECT pg_notify(%s, '')", (DONE_CHANNEL,))
