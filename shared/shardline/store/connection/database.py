"""Connections to Postgres: one place for driver, pool and timeouts. Knows no table."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, NullPool, create_engine, event, text
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from shardline.base.errors import Unavailable
from shardline.store.connection import decoding
from shardline.store.connection.database_url import libpq_parameters, normalize

CONNECT_TIMEOUT_S = 5
STATEMENT_TIMEOUT_S = 30.0
LOCK_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 60.0
"""A transaction left open by a frozen process is ended by the server, so that its locks go."""

POOL_SIZE = 5
POOL_TIMEOUT_S = 10.0
POOL_RECYCLE_S = 1800

SESSION = (
    "DateStyle=ISO",
    "IntervalStyle=postgres",
    "TimeZone=UTC",
    "extra_float_digits=1",
    "array_nulls=on",
    "standard_conforming_strings=on",
    "default_transaction_isolation=read\\ committed",
)
"""What the driver's decoders and our statements rest on, whatever a server, a database or a role
has as its default."""

EngineT = TypeVar("EngineT", Engine, AsyncEngine)

HAS_DATABASE = text("SELECT true FROM pg_database WHERE datname = :name")

READ_ONLY = "25006"
"""SQLSTATE of a server that takes no writes: a standby, or a primary that became one."""

NOT_PREPARED = ("26000", "42P05")
"""SQLSTATEs of a prepared statement that is not there, or is there already: a pooler gave us
another session."""

LOST = ("08", "57P", READ_ONLY, "25P03", "25P04", *NOT_PREPARED)
"""SQLSTATEs that begin so: the connection broke; the server shuts down, has crashed, starts, ended
this session, or is not the one that we want. In each case a new connection may do what this one
cannot."""

WRITABLE = {"in_hot_standby": "off", "default_transaction_read_only": "off"}
"""What a server reports of itself (from release 14 on) if it takes writes."""

OVER_LIMIT = "54"
"""SQLSTATEs that begin so: the program limit exceeded."""

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
    """Describes the driver's error, without the statement's parameters."""
    sqlstate = getattr(error.orig, "sqlstate", None)
    # Without a code it is the driver's own: there is no connection, or it would not send what it
    # was given.
    is_lost = (
        sqlstate.startswith(LOST)
        if sqlstate
        else isinstance(error, OperationalError | InterfaceError)
    )
    problem = str(error.orig).partition("\n")[0][:MAX_SAID]
    return Failure(
        is_lost=is_lost or error.connection_invalidated, sqlstate=sqlstate, problem=problem
    )


def unavailable(error: DBAPIError) -> Unavailable:
    """Returns the error with which a starting service reports it."""
    return Unavailable(f"{failure_of(error)}. Check SHARDLINE_DATABASE_URL and migrate")


def is_over_limit(cause: BaseException | None) -> bool:
    """Whether Postgres, or a trial of it, can never hold this: it has its own limit, such as JSON's
    256 MiB."""
    return (getattr(cause, "sqlstate", None) or "").startswith(OVER_LIMIT)


def connect(url: str, **options: Any) -> Engine:
    """A pool of connections. Connects lazily. `options`: the timeouts of `connect_arguments`, else
    create_engine's."""
    return _watched(create_engine(normalize(url), **_engine_options(url, options)))


def connect_async(url: str, **options: Any) -> AsyncEngine:
    """The same for asyncio."""
    engine = create_async_engine(normalize(url), **_engine_options(url, options))
    _watched(engine.sync_engine)
    return engine


def autocommitted(engine: EngineT) -> EngineT:
    """The same pool for questions of one statement: each statement is a separate transaction,
    without the round trips of BEGIN and COMMIT."""
    return engine.execution_options(isolation_level="AUTOCOMMIT")


@contextmanager
def transaction(url: str) -> Iterator[Connection]:
    """Runs a transaction on a separate connection, for those who ask Postgres now and then."""
    with connect(url, poolclass=NullPool).begin() as connection:
        yield connection


def create_database_if_missing(url: str, name: str) -> None:
    """On the server of this URL, which names another database of it."""
    engine = connect(url, poolclass=NullPool, isolation_level="AUTOCOMMIT", statement_timeout_s=0)
    with engine.connect() as connection:
        if not connection.scalar(HAS_DATABASE, {"name": name}):
            quoted = connection.dialect.identifier_preparer.quote_identifier(name)
            connection.execute(text(f"CREATE DATABASE {quoted}"))


def connect_arguments(
    given: Mapping[str, Any],
    *,
    application_name: str = "shardline",
    connect_timeout_s: int = CONNECT_TIMEOUT_S,
    statement_timeout_s: float | None = None,
    lock_timeout_s: float | None = None,
    idle_timeout_s: float | None = None,
) -> dict[str, Any]:
    """libpq's settings: nothing waits for ever, and a peer that vanished is noticed.

    `given` are those of the URL, which stay. Its `options` (or PGOPTIONS) are joined with ours:
    they come before the session settings that our decoders need and before time limits that the
    caller asks for, and after our defaults.
    """
    defaults = {
        "statement_timeout": STATEMENT_TIMEOUT_S,
        "lock_timeout": LOCK_TIMEOUT_S,
        "idle_in_transaction_session_timeout": IDLE_TIMEOUT_S,
    }
    asked = dict(zip(defaults, (statement_timeout_s, lock_timeout_s, idle_timeout_s), strict=True))
    of_url = str(given.get("options") or os.environ.get("PGOPTIONS", ""))
    options = [
        *(_limit(name, limit_s) for name, limit_s in defaults.items() if asked[name] is None),
        of_url,
        *(f"-c {setting}" for setting in SESSION),
        *(_limit(name, limit_s) for name, limit_s in asked.items() if limit_s is not None),
    ]
    return {
        "application_name": application_name,
        "connect_timeout": connect_timeout_s,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 30_000,
        # PGHOSTADDR would lead from the socket that the URL names to another server.
        **({"hostaddr": ""} if str(given.get("host", "")).startswith(("/", "@")) else {}),
        **given,
        "client_encoding": "UTF8",
        "options": " ".join(each for each in options if each),
    }


def _limit(name: str, limit_s: float) -> str:
    return f"-c {name}={int(limit_s * 1000)}"


def _adapt(connection: Any, _record: object) -> None:
    """A new connection, of SQLAlchemy or around the driver's own."""
    decoding.register(getattr(connection, "driver_connection", connection))


def _leave_details_out(context: ExceptionContext) -> None:
    """What Postgres adds to the first line quotes the row that it refuses: a prompt, on its way
    into logs."""
    if getattr(context.original_exception, "sqlstate", None) is None:
        return
    for error in (context.original_exception, context.sqlalchemy_exception):
        if error is not None and error.args and isinstance(error.args[0], str):
            error.args = (error.args[0].partition("\n")[0], *error.args[1:])


def _engine_options(url: str, options: dict[str, Any]) -> dict[str, Any]:
    names = connect_arguments.__kwdefaults__ or {}
    arguments = {name: options.pop(name) for name in list(options) if name in names}
    pool: dict[str, Any] = {
        "pool_pre_ping": True,
        "hide_parameters": True,
        "json_deserializer": decoding.load_json,
    }
    if "poolclass" not in options:
        pool |= {
            "pool_size": POOL_SIZE,
            "max_overflow": 0,
            "pool_timeout": POOL_TIMEOUT_S,
            # The server's process that was last used has its plans and tables at hand.
            "pool_use_lifo": True,
            "pool_recycle": POOL_RECYCLE_S,
        }
    return {
        **pool,
        "connect_args": connect_arguments(libpq_parameters(url), **arguments),
        **options,
    }


def _watched(engine: Engine) -> Engine:
    """Its pool keeps no connection that cannot do what a new one may: a ping alone passes on a
    standby."""
    has_pooler = threading.Event()

    def on_error(context: ExceptionContext) -> None:
        sqlstate = getattr(context.original_exception, "sqlstate", None) or ""
        if sqlstate.startswith(LOST):
            # SQLAlchemy drops this connection and all that are older than now.
            context.is_disconnect = True
        if sqlstate in NOT_PREPARED:
            has_pooler.set()

    def on_connect(_connection: object, record: ConnectionPoolEntry) -> None:
        driver = record.driver_connection
        if has_pooler.is_set() and driver is not None:
            driver.prepare_threshold = None

    def on_return(_connection: object, record: ConnectionPoolEntry) -> None:
        # One that reads only may stand for a server that is none of ours any more.
        driver = record.driver_connection
        if driver is not None and not driver.closed and not _takes_writes(driver):
            record.invalidate(soft=True)

    event.listen(engine, "handle_error", on_error)
    event.listen(engine, "handle_error", _leave_details_out)
    event.listen(engine, "connect", _adapt)
    event.listen(engine, "connect", on_connect)
    event.listen(engine, "checkin", on_return)
    return engine


def _takes_writes(driver: Any) -> bool:
    return all(
        driver.info.parameter_status(name) in (None, value) for name, value in WRITABLE.items()
    )
