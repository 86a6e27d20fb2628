"""LISTEN and NOTIFY: a bell without words. One that is missed costs its listener a poll, never a job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from sqlalchemy import Connection, func, select

from shardline.store.database import connect_arguments, normalise


def ring(connection: Connection, channel: str) -> None:
    """Heard by all listeners once this transaction commits; Postgres makes one of several in a transaction."""
    connection.execute(select(func.pg_notify(channel, "")))


def listen(channel: str) -> str:
    """The statement for a psycopg connection of one's own. `channel` is one of `tables`: it is not quoted, so that
    operators find it in pg_stat_activity as they write it. What was rung before it is heard by nobody."""
    return f"LISTEN {channel}"


class Bell:
    """A connection of its own that listens on one channel."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def wait(self, timeout_s: float) -> bool:
        """True if it rang within the time; all rings that wait count as one. Raises psycopg.OperationalError."""
        rang = any(True for _ in self._connection.notifies(timeout=timeout_s, stop_after=1))
        if rang:
            for _ in self._connection.notifies(timeout=0):
                pass
        return rang


@contextmanager
def listening(url: str, channel: str) -> Iterator[Bell]:
    """A bell that hears every NOTIFY from now on."""
    with psycopg.connect(libpq_url(url), autocommit=True, **connect_arguments(idle_timeout_s=0)) as connection:
        connection.execute(listen(channel))
        yield Bell(connection)


def libpq_url(url: str) -> str:
    """The URL as psycopg itself takes it."""
    return normalise(url).set(drivername="postgresql").render_as_string(hide_password=False)
