"""What is said of an error of Postgres: whether it is away, or there and unwilling, and its own
code."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from services.standalone.ports import free_port
from shardline.store.connection.database import Failure, connect, failure_of, transaction
from shardline.store.connection.notify import Listener
from tests.conftest import migrate

SECRET = "nobody else may read this"


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = connect(database_url, statement_timeout_s=0.2)
    yield engine
    engine.dispose()


def failure(engine: Engine, statement: str, **values: object) -> Failure:
    """Of this statement."""
    with pytest.raises(DBAPIError) as caught, engine.begin() as connection:
        connection.execute(text(statement), values)
    return failure_of(caught.value)


@pytest.mark.parametrize(
    ("statement", "sqlstate", "is_lost"),
    [
        ("SELECT 1 / 0", "22012", False),
        ("SELECT * FROM nowhere", "42P01", False),
        ("SELECT pg_sleep(60)", "57014", False),
        ("SELECT pg_terminate_backend(pg_backend_pid())", "57P01", True),
    ],
)
def test_the_code_of_a_server_error_says_whether_it_is_away(
    engine: Engine, statement: str, sqlstate: str, *, is_lost: bool
) -> None:
    found = failure(engine, statement)
    assert (found.sqlstate, found.is_lost) == (sqlstate, is_lost)
    assert str(found).startswith(
        f"Postgres {'unreachable' if is_lost else 'refuses a statement'} (SQLSTATE {sqlstate}): "
    )
    assert "\n" not in found.problem


def test_an_unreachable_server_is_away_without_a_code() -> None:
    found = failure(connect(f"postgresql://127.0.0.1:{free_port()}/none"), "SELECT 1")
    assert (found.sqlstate, found.is_lost) == (None, True)
    assert str(found).startswith("Postgres unreachable: ")


def test_what_the_driver_refuses_to_send_is_no_lost_server(engine: Engine) -> None:
    found = failure(engine, "SELECT CAST(:name AS text)", name="a\0b")
    assert (found.sqlstate, found.is_lost) == (None, False)


HABITS = {
    "DateStyle": "German, DMY",
    "IntervalStyle": "iso_8601",
    "TimeZone": "Asia/Kathmandu",
    "extra_float_digits": "-15",
    "array_nulls": "off",
    "standard_conforming_strings": "off",
    "default_transaction_isolation": "serializable",
    "client_encoding": "latin1",
    "bytea_output": "escape",
}
"""What a database may have as its defaults."""

DECODED = text(
    "SELECT now(), interval '1 day 2 hours', '{NULL,1}'::int[], 0.1::float8 + 0.2,"
    " '\\x00ff'::bytea, 'é€', $$a\\nb$$"
)


def test_a_session_is_as_decoders_need_it_whatever_the_database_has_as_default(
    database_url: str,
) -> None:
    with psycopg.connect(database_url, autocommit=True) as admin:
        for name, value in HABITS.items():
            of_database = sql.Identifier(admin.info.dbname)
            setting = sql.Identifier(name)
            admin.execute(
                sql.SQL("ALTER DATABASE {} SET {} = {}").format(
                    of_database, setting, sql.Literal(value)
                )
            )
    engine = connect(database_url)
    with engine.connect() as connection:
        at, interval, array, number, octets, letters, _ = connection.execute(DECODED).one()
        assert at.utcoffset() == timedelta()
        assert (interval, array, number) == (timedelta(days=1, hours=2), [None, 1], 0.1 + 0.2)
        assert (octets, letters) == (b"\x00\xff", "é€")
        assert connection.scalar(text("SHOW transaction_isolation")) == "read committed"
    engine.dispose()


def test_the_schema_that_the_url_names_is_used_by_pool_listener_and_migration(
    empty_database_url: str,
) -> None:
    with psycopg.connect(empty_database_url, autocommit=True) as admin:
        admin.execute("CREATE SCHEMA app")
        url = f"{empty_database_url}&options=-csearch_path%3Dapp"
        migrate(url)
        found = admin.execute(
            "SELECT DISTINCT schemaname FROM pg_tables WHERE tablename = 'jobs'"
        ).fetchall()
    assert found == [("app",)]
    with transaction(url) as connection:
        assert connection.scalar(text("SELECT count(*) FROM jobs")) == 0
    listener = Listener(url, "rung")
    listener.open()
    assert listener._connection is not None
    assert listener._connection.execute("SHOW search_path").fetchone() == ("app",)
    listener.close()


def test_what_postgres_says_of_a_refused_row_is_told_without_the_row(engine: Engine) -> None:
    statement = text("INSERT INTO jobs (model, prompt, priority) VALUES ('m', :prompt, 77)")
    with pytest.raises(IntegrityError) as caught, engine.begin() as connection:
        connection.execute(statement, {"prompt": SECRET})

    error = caught.value
    assert error.orig is not None
    assert "violates check constraint" in str(error.orig)
    assert "Failing row" not in str(error.orig)
    assert SECRET not in str(error)
