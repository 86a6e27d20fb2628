"""Connections of commands that act: the audit log has the user's name. Owns no SQL: the store
does."""

from __future__ import annotations

import getpass
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine, event

from shardline.base.config import Settings
from shardline.client import Client
from shardline.client.database import reachable
from shardline.store import audit
from shardline.store.connection.database import connect


@contextmanager
def transaction() -> Iterator[Connection]:
    """Connects to SHARDLINE_DATABASE_URL; committed at the end. Raises Unavailable, Busy."""
    with _engine() as engine, reachable(), engine.begin() as connection:
        yield connection


@contextmanager
def acting_client() -> Iterator[Client]:
    """A client whose transactions say who acts."""
    with _engine() as engine, Client(database=engine) as client:
        yield client


@contextmanager
def _engine() -> Iterator[Engine]:
    engine = connect(Settings().database_url.get_secret_value())
    actor = f"cli {_user()}"
    event.listen(engine, "begin", lambda connection: audit.act_as(connection, actor))
    try:
        yield engine
    finally:
        engine.dispose()


def _user() -> str:
    """The name of the process's user; in a container there may be none."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"
