"""How both clients reach Postgres: errors, transactions of the caller, and the address for LISTEN. Owns no SQL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from psycopg.errors import ReadOnlySqlTransaction
from sqlalchemy import URL, Connection
from sqlalchemy.exc import DBAPIError, InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from shardline.errors import Unavailable
from shardline.store.database import normalise

MAX_IDS_PER_QUERY = 1_000
POLL_S = 1.0
"""A NOTIFY that was missed costs so much."""

AWAY = (OperationalError, InterfaceError, PoolTimeout, OSError)


@contextmanager
def reachable() -> Iterator[None]:
    """Turns a Postgres that is away into Unavailable. The commit may have happened: retry with the same id."""
    try:
        yield
    except AWAY as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        raise Unavailable(f"Postgres cannot be reached: {str(cause).splitlines()[0][:200]}") from error
    except InternalError as error:
        if isinstance(error.orig, ReadOnlySqlTransaction):
            raise Unavailable("Postgres takes no writes: it is a standby, or read-only for now") from error
        raise


def connection_of(session: Session | Connection) -> Connection:
    """The connection on which the caller's own transaction runs."""
    return session if isinstance(session, Connection) else session.connection()


def listen_address(database_url: str | URL) -> str:
    """For a plain psycopg connection: SQLAlchemy's pools cannot wait for a NOTIFY."""
    url = normalise(database_url) if isinstance(database_url, str) else database_url
    return url.set(drivername="postgresql").render_as_string(hide_password=False)
