"""A connection that is kept from statement to statement, and what it does without its server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from shardline.store.connection.database import connect_async
from shardline.store.connection.held_connection import HeldConnection
from tests.integration.rows import cell
from tests.polling import until


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[AsyncEngine]:
    pool = connect_async(database_url, pool_size=1)
    yield pool
    await pool.dispose()


def session(connection: Connection) -> int:
    """The server's process that answers."""
    pid: int = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
    return pid


async def test_statements_share_a_session_until_the_block_ends(pool: AsyncEngine) -> None:
    async with HeldConnection(pool) as held:
        assert await held.ask(session) == await held.ask(session)
    async with pool.connect() as connection:
        assert await connection.run_sync(session)


async def test_the_next_statement_does_without_a_session_that_was_ended(
    pool: AsyncEngine, engine: Engine
) -> None:
    async with HeldConnection(pool) as held:
        ended = await held.ask(session)
        cell(engine, "SELECT pg_terminate_backend(:pid)", pid=ended)
        alive = "SELECT count(*) FROM pg_stat_activity WHERE pid = :pid"
        until(lambda: cell(engine, alive, pid=ended) == 0)
        assert await held.ask(session) != ended


async def test_a_refused_statement_leaves_it_usable(pool: AsyncEngine) -> None:
    async with HeldConnection(pool) as held:
        with pytest.raises(DBAPIError):
            await held.ask(lambda connection: connection.execute(text("SELECT 1 / 0")))
        assert await held.ask(session)
