"""Connections of commands that act: the audit log has the user's name. Owns no SQL: the store
does."""

from __future__ import annotations

import getpass
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from sqlalchemy import Connection, Engine, event

from shardline.base.config import Settings
from shardline.client import Client
from shardline.client.database import reachable
from shardline.client.questions import Answer, Question
from shardline.store import audit
from shardline.store.connection.database import connect


class Ask(Protocol):
    """Asks a question in a separate transaction. Raises Unavailable, Busy."""

    def __call__(self, question: Question[Answer]) -> Answer:
        """Returns the answer, committed."""
        ...


@contextmanager
def transaction() -> Iterator[Connection]:
    """Connects to SHARDLINE_DATABASE_URL; committed at the end. Raises Unavailable, Busy."""
    with _engine() as engine, reachable(), engine.begin() as connection:
        yield connection


@contextmanager
def acting_client() -> Iterator[Client]:
    """Yields a client that names the actor in its transactions."""
    with _engine() as engine, Client(database=engine) as client:
        yield client


@contextmanager
def asking(url: str) -> Iterator[Ask]:
    """Connects to a database for many questions, for as long as a command runs."""
    with _engine(url) as engine:

        def ask(question: Question[Answer]) -> Answer:
            with reachable(), engine.begin() as connection:
                return question(connection)

        yield ask


@contextmanager
def _engine(url: str | None = None) -> Iterator[Engine]:
    engine = connect(url or Settings().database_url.get_secret_value())
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
