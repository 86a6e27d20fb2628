"""Turns the errors of the driver into ours: what Postgres does not do, as clients report it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Dialect
from sqlalchemy.exc import DataError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from shardline.base.errors import Busy, Invalid, Unavailable
from shardline.store.connection.database import READ_ONLY, failure_of, is_over_limit
from shardline.store.tenants.limits import limit_error_of

AWAY = (OperationalError, InterfaceError, PoolTimeout, OSError)

BUSY = {
    "40P01": "two transactions waited for each other, and Postgres ended this one",
    "40001": "another transaction changed the same rows first",
    "55P03": "another transaction held the same rows for longer than lock_timeout",
    "57014": "the statement took longer than statement_timeout, or an operator ended it",
    "53100": "Postgres has no disk left",
    "53200": "Postgres has no memory left",
    "53300": "Postgres has no connection left, see max_connections",
}
"""What Postgres itself answers, by SQLSTATE: it is there, and has stored nothing."""

PARAMSTYLE = "pyformat"
"""How our SQL names its parameters."""

NO_TABLES = ("42P01", "42703", "3F000")
"""SQLSTATEs of a table, a column or a schema that is not there."""


def check_driver(dialect: Dialect) -> None:
    """Raises Invalid for a caller's connection whose driver cannot take our SQL, as asyncpg."""
    if dialect.paramstyle != PARAMSTYLE:
        problem = f"its driver is {dialect.driver}"
        raise Invalid("session", problem, "Use a database URL with postgresql+psycopg")


@contextmanager
def reachable() -> Iterator[None]:
    """Turns every error of the driver into one of ours: an unreachable Postgres into Unavailable
    (the commit may have happened: retry with the same id), one that could not do it now into Busy
    (nothing has happened), what it can never do or cannot take into Invalid."""
    try:
        yield
    except PoolTimeout as error:
        raise Busy(
            "every connection of this process's pool is in use: ask less at a time"
        ) from error
    except AWAY as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        if (over := limit_error_of(cause)) is not None:
            raise over from error
        problem = BUSY.get(getattr(cause, "sqlstate", None) or "")
        if is_over_limit(cause):
            raise Invalid(
                "request", f"it is over a limit of Postgres: {_first_line(cause)}", "Ask for less"
            ) from error
        if problem is not None:
            raise Busy(problem, _first_line(cause)) from error
        raise Unavailable("Postgres cannot be reached", _first_line(cause)) from error
    except (DataError, UnicodeError) as error:
        problem = _first_line(error.orig if isinstance(error, DataError) else error)
        remedy = "Pass values of the kinds and within the bounds of docs/jobs.md"
        raise Invalid(
            "request", f"Postgres cannot take a value of it: {problem}", remedy
        ) from error
    except DBAPIError as error:
        raise Unavailable(
            _refusal(getattr(error.orig, "sqlstate", None) or ""), _first_line(error.orig)
        ) from error


def _refusal(sqlstate: str) -> str:
    if sqlstate == READ_ONLY:
        return "Postgres takes no writes: it is a standby, or read-only for now"
    if sqlstate in NO_TABLES:
        return "This database lacks Shardline's tables: run `alembic upgrade head`"
    return f"Postgres refuses a statement (SQLSTATE {sqlstate})"


def outage_of(error: BaseException) -> str:
    """Returns what is wrong with Postgres, for a log line of a caller that goes on without it."""
    return (
        str(failure_of(error))
        if isinstance(error, DBAPIError)
        else f"Postgres unreachable: {_first_line(error)}"
    )


def _first_line(cause: BaseException | None) -> str:
    return str(cause).partition("\n")[0][:200]
