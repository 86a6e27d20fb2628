"""What the clients say when Postgres is there and does not do it: never that it is away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, text

from shardline.base.errors import Busy, Invalid, Unavailable
from shardline.client import Client
from shardline.client.database import BUSY, reachable
from shardline.store.connection.database import connect


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """One connection, and little patience."""
    engine = connect(
        database_url, statement_timeout_s=0.3, lock_timeout_s=0.1, pool_size=1, pool_timeout=0.1
    )
    yield engine
    engine.dispose()


@pytest.fixture
def client(engine: Engine, redis_url: str) -> Iterator[Client]:
    with Client(database=engine, redis_url=redis_url) as client:
        yield client


@pytest.mark.parametrize("code", BUSY)
def test_a_postgres_that_refuses_for_now_is_busy_and_not_away(engine: Engine, code: str) -> None:
    refusal = f"DO $$ BEGIN RAISE EXCEPTION 'not now' USING ERRCODE = '{code}'; END $$"
    with (
        pytest.raises(Busy, match=f"^{BUSY[code]}: not now"),
        reachable(),
        engine.begin() as connection,
    ):
        connection.execute(text(refusal))


@pytest.mark.parametrize("code", ["54000", "54001", "54011", "54023"])
def test_what_is_over_a_limit_of_postgres_is_invalid_and_not_busy(
    engine: Engine, client: Client, code: str
) -> None:
    refusal = f"RAISE EXCEPTION 'too large' USING ERRCODE = '{code}';"
    with (
        pytest.raises(Invalid, match="over a limit of Postgres: too large"),
        reachable(),
        engine.begin() as connection,
    ):
        connection.execute(text(f"DO $$ BEGIN {refusal} END $$"))
    with engine.begin() as connection:
        body = f"RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {refusal} END $$"
        connection.execute(text(f"CREATE FUNCTION too_large() {body}"))
        connection.execute(
            text("CREATE TRIGGER too_large BEFORE INSERT ON jobs EXECUTE FUNCTION too_large()")
        )
    with pytest.raises(Invalid, match="over a limit of Postgres: too large"):
        client.submit("m", "one")


def test_a_statement_over_its_time_names_the_limit(engine: Engine) -> None:
    with pytest.raises(Busy, match="statement_timeout"), reachable(), engine.begin() as connection:
        connection.execute(text("SELECT pg_sleep(60)"))


def test_submitting_over_a_locked_row_names_the_lock(client: Client, database_url: str) -> None:
    other = connect(database_url)
    with other.begin() as connection:
        connection.execute(text("LOCK TABLE jobs IN EXCLUSIVE MODE"))
        with pytest.raises(Busy, match="lock_timeout"):
            client.submit("m", "one")
    other.dispose()
    client.submit("m", "one")


def test_submitting_without_a_free_connection_names_the_pool(
    client: Client, engine: Engine
) -> None:
    with (
        engine.connect(),
        pytest.raises(Busy, match="every connection of this process's pool is in use"),
    ):
        client.submit("m", "one")


def test_a_server_that_is_away_is_not_called_busy(redis_url: str) -> None:
    with (
        Client(
            database_url="postgresql://shardline@127.0.0.1:1/none", redis_url=redis_url
        ) as client,
        pytest.raises(Unavailable, match="cannot be reached") as caught,
    ):
        client.submit("m", "one")
    assert not isinstance(caught.value, Busy)
