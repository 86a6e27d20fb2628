"""LISTEN and NOTIFY: a bell without words. One that is missed costs its listener a poll, never a job."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql
from sqlalchemy import URL, Connection, text

from shardline.store.database import connect_arguments, normalize

RING = text("SELECT pg_notify(:channel, '')")


def ring(connection: Connection, channel: str) -> None:
    """Heard by all listeners once this transaction commits; Postgres makes one of several in a transaction."""
    connection.execute(RING, {"channel": channel})


class Listener:
    """A connection of its own that listens on one channel, for one thread at a time."""

    def __init__(self, url: str | URL, channel: str) -> None:
        self._url = url
        self._channel = channel
        self._connection: psycopg.Connection[Any] | None = None

    def open(self) -> None:
        """Hear every NOTIFY from now on. Raises psycopg.Error."""
        self._connection = psycopg.connect(libpq_url(self._url), **_options())
        self._connection.execute(_listen(self._channel))

    def close(self) -> None:
        """Give the connection back."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def wait(self, timeout_s: float) -> bool:
        """True if it rang within the time; all rings that wait count as one.

        A listener that is not open opens now and returns True: what rang before was heard by nobody. Raises
        psycopg.Error, and opens again at the next call.
        """
        try:
            if self._connection is None:
                self.open()
                return True
            rang = any(True for _ in self._connection.notifies(timeout=timeout_s, stop_after=1))
            if rang:
                for _ in self._connection.notifies(timeout=0):
                    pass
        except (psycopg.Error, OSError):
            self.close()
            raise
        return rang


@contextmanager
def listening(url: str, channel: str) -> Iterator[Listener]:
    """A listener that hears every NOTIFY from now on."""
    listener = Listener(url, channel)
    try:
        listener.open()
        yield listener
    finally:
        listener.close()


async def rings(url: str | URL, channel: str) -> AsyncIterator[None]:
    """For asyncio: one item once it listens, because what rang before was heard by nobody, then one for each ring.

    Raises psycopg.Error.
    """
    async with await psycopg.AsyncConnection.connect(libpq_url(url), **_options()) as connection:
        await connection.execute(_listen(channel))
        yield
        async for _ in connection.notifies():
            yield


def libpq_url(url: str | URL) -> str:
    """The URL as psycopg itself takes it: SQLAlchemy's pools cannot wait for a NOTIFY."""
    parsed = normalize(url) if isinstance(url, str) else url
    return parsed.set(drivername="postgresql").render_as_string(hide_password=False)


def _options() -> dict[str, Any]:
    return {"autocommit": True, **connect_arguments(idle_timeout_s=0)}


def _listen(channel: str) -> sql.Composed:
    return sql.SQL("LISTEN {}").format(sql.Identifier(channel))
