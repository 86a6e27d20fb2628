"""Two Postgres, one a standby of the other: after a failover no pool and no listener stays with the
wrong one."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from services.standalone.servers import Postgres
from shardline.store.connection.database import connect, connect_async, failure_of
from shardline.store.connection.notify import Listener, rings
from tests.polling import until
from tests.postgres_pair import PostgresPair

TABLE = "CREATE TABLE written (number int)"
WRITE = text("INSERT INTO written VALUES (1)")
SERVER = text("SELECT setting FROM pg_settings WHERE name = 'unix_socket_directories'")
CHANNEL = "rung"


@pytest.fixture
def pair() -> Iterator[PostgresPair]:
    home = Path(tempfile.mkdtemp(prefix="shardline-pair-"))
    pair = PostgresPair(home)
    try:
        pair.start()
        with psycopg.connect(pair.url(), autocommit=True) as connection:
            connection.execute(TABLE)
        yield pair
    finally:
        pair.end()
        shutil.rmtree(home, ignore_errors=True)


def write(engine: Engine) -> str | None:
    """The socket folder of the server that took it, None where none did."""
    try:
        with engine.begin() as connection:
            connection.execute(WRITE)
            return str(connection.scalar(SERVER))
    except DBAPIError as error:
        if not failure_of(error).is_lost:
            raise
        return None


def until_written(engine: Engine, server: Postgres) -> None:
    """A write reaches this server, in at most as many tries as a pool has connections and one
    more."""
    assert str(server.sockets) in [write(engine) for _ in range(2)]


def test_the_next_write_after_a_failover_and_back_goes_to_the_new_primary(
    pair: PostgresPair,
) -> None:
    engine = connect(pair.url())
    until_written(engine, pair.primary)
    for _ in range(2):
        pair.fail_over()
        until_written(engine, pair.primary)
        pair.rejoin()
        until_written(engine, pair.primary)
    engine.dispose()


def test_a_pool_leaves_a_primary_that_became_a_standby_at_its_address(pair: PostgresPair) -> None:
    """As behind one name, which leads to the old primary until an operator or the name's server
    changes it."""
    engine = connect(pair.url_of_name(), pool_size=2)
    reader = connect(pair.url_of_name(), pool_size=2)
    pair.fail_over()
    pair.rejoin()
    with engine.connect() as one, engine.connect() as two, reader.connect() as three:
        pids = [
            connection.scalar(text("SELECT pg_backend_pid()")) for connection in (one, two, three)
        ]
    assert len(set(pids)) == 3
    assert write(engine) is None, "a standby takes no writes"

    pair.move_name()

    until_written(engine, pair.primary)
    with reader.connect() as connection:
        assert connection.scalar(SERVER) == str(pair.primary.sockets), "what only reads moves too"
    engine.dispose()
    reader.dispose()


def test_a_pool_leaves_sessions_that_may_only_read(database_url: str) -> None:
    """As a server does whose disk is full, and some services of it during a failover."""
    engine = connect(database_url, pool_size=2)
    with engine.begin() as connection:
        connection.execute(text(TABLE))
    with psycopg.connect(database_url, autocommit=True) as admin:
        name = sql.Identifier(admin.info.dbname)
        admin.execute(
            sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(name)
        )
        engine.dispose()
        with engine.connect() as one, engine.connect() as two:
            assert one.scalar(text("SHOW transaction_read_only")) == two.scalar(
                text("SHOW transaction_read_only")
            )
        assert write(engine) is None
        admin.execute(sql.SQL("ALTER DATABASE {} RESET default_transaction_read_only").format(name))

    assert write(engine) is not None
    assert write(engine) is not None
    engine.dispose()


async def test_a_pool_of_asyncio_goes_to_the_new_primary(pair: PostgresPair) -> None:
    engine = connect_async(pair.url(), pool_size=1)
    async with engine.begin() as connection:
        await connection.execute(WRITE)
    await asyncio.to_thread(pair.fail_over)
    await asyncio.to_thread(pair.rejoin)
    async with engine.begin() as connection:
        await connection.execute(WRITE)
        assert await connection.scalar(SERVER) == str(pair.primary.sockets)
    await engine.dispose()


def test_a_listener_hears_the_new_primary(pair: PostgresPair) -> None:
    listener = Listener(pair.url(), CHANNEL)
    listener.open()
    pair.fail_over()
    pair.rejoin()
    with pytest.raises(psycopg.OperationalError):
        listener.wait(60)
    assert listener.wait(60), "it opens anew"

    with psycopg.connect(pair.url(), autocommit=True) as connection:
        connection.execute("SELECT pg_notify(%s, '')", (CHANNEL,))

    assert listener.wait(60)
    listener.close()


def test_a_listener_whose_session_was_changed_listens_again(database_url: str) -> None:
    listener = Listener(database_url, CHANNEL, check_s=0)
    listener.open()
    assert not listener.wait(0), "all is well: it stays"
    assert listener._connection is not None
    listener._connection.execute("UNLISTEN *")

    assert listener.wait(0), "what rang before was heard by nobody"

    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("SELECT pg_notify(%s, '')", (CHANNEL,))
    assert listener.wait(60)
    listener.close()


async def test_rings_end_where_nothing_rings_and_go_on_where_it_does(database_url: str) -> None:
    heard = rings(database_url, CHANNEL, check_s=0)
    await anext(heard)
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection:
        await connection.execute("SELECT pg_notify(%s, '')", (CHANNEL,))
    await anext(heard)
    await heard.aclose()

    reads_only = f"{database_url}&options=-cdefault_transaction_read_only%3Don"
    assert [item async for item in rings(reads_only, CHANNEL, check_s=0)] == [None]


@pytest.mark.parametrize("code", ["26000", "42P05"])
def test_a_pooler_that_changed_its_backend_costs_one_try_and_no_more(
    database_url: str, code: str
) -> None:
    engine = connect(database_url, pool_size=1)
    with engine.connect() as connection:
        before = connection.scalar(text("SELECT pg_backend_pid()"))
    with pytest.raises(DBAPIError) as caught, engine.connect() as connection:
        connection.execute(
            text(f"DO $$ BEGIN RAISE EXCEPTION 'statement' USING ERRCODE = '{code}'; END $$")
        )
    assert failure_of(caught.value).is_lost
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT pg_backend_pid()")) != before
        for _ in range(20):
            connection.scalar(text("SELECT 1"))
        assert connection.scalar(text("SELECT count(*) FROM pg_prepared_statements")) == 0, (
            "behind a pooler"
        )
    engine.dispose()


def test_prepared_statements_are_used_until_a_pooler_shows(database_url: str) -> None:
    engine = connect(database_url, pool_size=1)
    with engine.connect() as connection:
        for _ in range(20):
            connection.scalar(text("SELECT 1"))
        assert until(lambda: connection.scalar(text("SELECT count(*) FROM pg_prepared_statements")))
    engine.dispose()
