"""LISTEN and NOTIFY: a bell without words. One that is missed costs its listener a poll, never a
job."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql
from sqlalchemy import URL, Connection, text

from shardline.store.connection.database import connect_arguments
from shardline.store.connection.database_url import libpq_parameters

CHECK_S = 10.0
"""Silence after which a listener asks whether it would hear anything."""

IS_DEAF = """
SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::boolean
    OR %s NOT IN (SELECT pg_listening_channels())
"""
"""On a standby, or in another session than the one that listened, because a pooler changed it:
nothing rings."""

RING = text("SELECT pg_notify(:channel, '')")


def ring(connection: Connection, channel: str) -> None:
    """Heard by all listeners once this transaction commits; Postgres makes one of several in a
    transaction."""
    connection.execute(RING, {"channel": channel})


class Listener:
    """A separate connection that listens on one channel, for one thread at a time."""

    def __init__(self, url: str | URL, channel: str, *, check_s: float = CHECK_S) -> None:
        self._parameters = libpq_parameters(url)
        self._channel = channel
        self._check_s = check_s
        self._heard_s = 0.0
        self._connection: psycopg.Connection[Any] | None = None

    def open(self) -> None:
        """Hear every NOTIFY from now on. Raises psycopg.Error."""
        self._connection = psycopg.connect(**_options(self._parameters))
        self._connection.execute(_listen(self._channel))
        self._heard_s = time.monotonic()

    def close(self) -> None:
        """Give the connection back."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def wait(self, timeout_s: float) -> bool:
        """True if it rang within the time; all rings that wait count as one.

        A listener that is not open, or has become deaf, opens now and returns True: what rang
        before was not heard. Raises psycopg.Error, and opens again at the next call.
        """
        try:
            if self._connection is None:
                self.open()
                return True
            rang = any(True for _ in self._connection.notifies(timeout=timeout_s, stop_after=1))
            if rang:
                for _ in self._connection.notifies(timeout=0):
                    pass
            elif self._is_deaf(self._connection):
                self.close()
                self.open()
                return True
        except (psycopg.Error, OSError):
            self.close()
            raise
        return rang

    def _is_deaf(self, connection: psycopg.Connection[Any]) -> bool:
        if time.monotonic() < self._heard_s + self._check_s:
            return False
        self._heard_s = time.monotonic()
        row = connection.execute(IS_DEAF, [self._channel]).fetchone()
        return row is not None and bool(row[0])


@contextmanager
def listening(url: str, channel: str) -> Iterator[Listener]:
    """A listener that hears every NOTIFY from now on."""
    listener = Listener(url, channel)
    try:
        listener.open()
        yield listener
    finally:
        listener.close()


async def rings(
    url: str | URL, channel: str, *, check_s: float = CHECK_S
) -> AsyncGenerator[None, None]:
    """Yields, for asyncio, one item once it listens, because what rang before was not heard, then
    one for each ring.

    Ends when it has become deaf. Raises psycopg.Error.
    """
    async with await psycopg.AsyncConnection.connect(
        **_options(libpq_parameters(url))
    ) as connection:
        await connection.execute(_listen(channel))
        yield
        while True:
            async for _ in connection.notifies(timeout=check_s):
                yield
            row = await (await connection.execute(IS_DEAF, [channel])).fetchone()
            if row is None or row[0]:
                return


def _options(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"autocommit": True, **connect_arguments(parameters, idle_timeout_s=0)}


def _listen(channel: str) -> sql.Composed:
    return sql.SQL("LISTEN {}").format(sql.Identifier(channel))
