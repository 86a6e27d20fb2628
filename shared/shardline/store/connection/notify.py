"""LISTEN and NOTIFY: payloads are hints. A missed notification costs its listener a poll, never a
job.

Locks: an advisory one of a listener that leads, as long as it listens.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

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

RING = text("SELECT pg_notify(:channel, unnest(CAST(:words AS text[])))")
LEAD = "SELECT pg_try_advisory_lock(%s)"

IDS_IN_A_RING = 200
"""Postgres takes 8,000 bytes."""


def ring(connection: Connection, channel: str, word: str = "") -> None:
    """Notifies all listeners when this transaction commits; Postgres merges equal notifications
    of one transaction."""
    connection.execute(RING, {"channel": channel, "words": [word]})


def ring_ids(connection: Connection, channel: str, ids: Collection[UUID]) -> None:
    """Rings with ids, joined by commas: once for each IDS_IN_A_RING of them."""
    names = [str(each) for each in ids]
    starts = range(0, len(names), IDS_IN_A_RING)
    words = [",".join(names[start : start + IDS_IN_A_RING]) for start in starts]
    connection.execute(RING, {"channel": channel, "words": words})


class Listener:
    """A separate connection that listens on one channel, for one thread at a time."""

    def __init__(self, url: str | URL, channel: str, *, check_s: float = CHECK_S) -> None:
        self._parameters = libpq_parameters(url)
        self._channel = channel
        self._check_s = check_s
        self._heard_s = 0.0
        self._leads = False
        self._connection: psycopg.Connection[Any] | None = None

    def open(self) -> None:
        """Hear every NOTIFY from now on. Raises psycopg.Error."""
        self._connection = psycopg.connect(**_options(self._parameters))
        self._connection.execute(_listen(self._channel))
        self._heard_s = time.monotonic()

    def close(self) -> None:
        """Give the connection back."""
        self._leads = False
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def wait(self, timeout_s: float) -> bool:
        """True if it rang within the time, or may have rung; all rings that wait count as one.
        Raises what `hear` raises."""
        words = self.hear(timeout_s)
        return words is None or bool(words)

    def hear(self, timeout_s: float) -> list[str] | None:
        """The words of all rings that came within the time, and wait.

        A listener that is not open, or has become deaf, opens now and returns None: what rang
        before was not heard. Raises psycopg.Error, and opens again at the next call.
        """
        try:
            if self._connection is None:
                self.open()
                return None
            rings = self._connection.notifies(timeout=timeout_s, stop_after=1)
            words = [one.payload for one in rings]
            if words:
                words += [one.payload for one in self._connection.notifies(timeout=0)]
            elif self._is_deaf(self._connection):
                self.close()
                self.open()
                return None
        except (psycopg.Error, OSError):
            self.close()
            raise
        return words

    def leads(self, lock: int) -> bool:
        """Whether it is the only listener with this advisory lock, which it asks for, and keeps as
        long as its connection. Raises psycopg.Error."""
        if not self._leads and self._connection is not None:
            row = self._connection.execute(LEAD, [lock]).fetchone()
            self._leads = row is not None and bool(row[0])
        return self._leads

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
