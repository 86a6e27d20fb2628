"""What is said of an error of Postgres: whether it is away, or there and unwilling, and its own code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from services.standalone.ports import free_port
from shardline.store.database import Failure, connect, failure_of


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
