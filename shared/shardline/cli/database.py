"""A transaction of a command that asks Postgres itself. Owns no SQL: the store does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection

from shardline.base.config import Settings
from shardline.client.database import reachable
from shardline.store.connection.database import connect


@contextmanager
def transaction() -> Iterator[Connection]:
    """Connects to SHARDLINE_DATABASE_URL; committed at the end. Raises Unavailable, Busy."""
    engine = connect(Settings().database_url.get_secret_value())
    try:
        with reachable(), engine.begin() as connection:
            yield connection
    finally:
        engine.dispose()
