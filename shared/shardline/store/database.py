"""Connections to Postgres: one place for driver, pool and timeouts. Knows no table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from shardline.errors import Invalid

CONNECT_TIMEOUT_S = 5
STATEMENT_TIMEOUT_S = 30.0
LOCK_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 60.0
"""A transaction left open by a frozen process is ended by the server, so that its locks go."""

POOL_SIZE = 5
POOL_TIMEOUT_S = 10.0
POOL_RECYCLE_S = 1800
SCHEMES = ("postgresql", "postgres", "postgresql+psycopg", "postgresql+psycopg_async")

HAS_DATABASE = text("SELECT true FROM pg_database WHERE datname = :name")

LOST = ("08", "57P")
"""SQLSTATEs that begin so: the connection broke; the server shuts down, has crashed, starts, or ended this session."""

MAX_SAID = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What went wrong between us and Postgres, for logs and errors."""

    is_lost: bool
    """The connection, or the server. Else it is there and has refused a statement."""
    sqlstate: str | None
    problem: str

    def __str__(self) -> str:
        kind = "unreachable" if self.is_lost else "refuses a statement"
        code = f" (SQLSTATE {self.sqlstate})" if self.sqlstate else ""
        return f"Postgres {kind}{code}: {self.problem}"


def failure_of(error: DBAPIError) -> Failure:
    """Of the driver's error; the statement's parameters are not told."""
    sqlstate = getattr(error.orig, "sqlstate", None)
    # Without a code it is the driver's own: there is no connection, or it would not send what it was given.
    is_lost = sqlstate.startswith(LOST) if sqlstate else isinstance(error, OperationalError | InterfaceError)
    problem = str(error.orig).partition("\n")[0][:MAX_SAID]
    return Failure(is_lost=is_lost or error.connection_invalidated, sqlstate=sqlstate, problem=problem)


def connect(url: str, **options: Any) -> Engine:
    """A pool of connections. Connects lazily. `options`: the timeouts of `connect_arguments`, else create_engine's."""
    return create_engine(normalize(url), **_engine_options(options))


def connect_async(url: str, **options: Any) -> AsyncEngine:
    """The same for asyncio."""
    return create_async_engine(normalize(url), **_engine_options(options))


@contextmanager
def transaction(url: str) -> Iterator[Connection]:
    """A transaction on a connection of its own, for those who ask Postgres now and then."""
    with connect(url, poolclass=NullPool).begin() as connection:
        yield connection


def create_database_if_missing(url: str, name: str) -> None:
    """On the server of this URL, which names another database of it."""
    engine = connect(url, poolclass=NullPool, isolation_level="AUTOCOMMIT", statement_timeout_s=0)
    with engine.connect() as connection:
        if not connection.scalar(HAS_DATABASE, {"name": name}):
            quoted = connection.dialect.identifier_preparer.quote_identifier(name)
            connection.execute(text(f"CREATE DATABASE {quoted}"))


def normalize(url: str) -> URL:
    """Any Postgres URL, also of a unix socket, with the psycopg 3 driver. Raises Invalid without repeating the URL."""
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise Invalid("database_url", "it is no URL", "Write postgresql://user:password@host/database") from error
    if parsed.drivername not in SCHEMES:
        raise Invalid("database_url", f"its scheme is {parsed.drivername!r}", "Write postgresql://…")
    return parsed.set(drivername="postgresql+psycopg")


def connect_arguments(
    *,
    application_name: str = "shardline",
    connect_timeout_s: int = CONNECT_TIMEOUT_S,
    statement_timeout_s: float = STATEMENT_TIMEOUT_S,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
    idle_timeout_s: float = IDLE_TIMEOUT_S,
) -> dict[str, Any]:
    """libpq's settings: nothing waits for ever, and a peer that vanished is noticed."""
    server_settings = {
        "statement_timeout": statement_timeout_s,
        "lock_timeout": lock_timeout_s,
        "idle_in_transaction_session_timeout": idle_timeout_s,
    }
    return {
        "application_name": application_name,
        "connect_timeout": connect_timeout_s,
        "options": " ".join(f"-c {name}={int(value_s * 1000)}" for name, value_s in server_settings.items()),
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 30_000,
    }


def _engine_options(options: dict[str, Any]) -> dict[str, Any]:
    names = connect_arguments.__kwdefaults__ or {}
    arguments = {name: options.pop(name) for name in list(options) if name in names}
    pool: dict[str, Any] = {"pool_pre_ping": True, "hide_parameters": True}
    if "poolclass" not in options:
        pool |= {
            "pool_size": POOL_SIZE,
            "max_overflow": 0,
            "pool_timeout": POOL_TIMEOUT_S,
            "pool_recycle": POOL_RECYCLE_S,
        }
    return {**pool, "connect_args": connect_arguments(**arguments), **options}
