"""Alembic's entry: runs migrations against `SHARDLINE_DATABASE_URL`. Owns no schema; that is shardline.tables."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Engine
from sqlalchemy.pool import NullPool

from shardline.config import Settings
from shardline.store.database import connect
from shardline.tables import metadata

LOCK = 7_305_793_411
"""Advisory lock: two migrations at once wait for each other."""


def _engine() -> Engine:
    url = Settings().database_url.get_secret_value()
    return connect(
        url, poolclass=NullPool, application_name="shardline-migrate", statement_timeout_s=0, lock_timeout_s=0
    )


def run_online() -> None:
    """One transaction for all steps: a failed upgrade leaves nothing behind."""
    with _engine().connect() as connection:
        context.configure(connection=connection, target_metadata=metadata, compare_server_default=True)
        with context.begin_transaction():
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({LOCK})")
            context.run_migrations()


def run_offline() -> None:
    """`alembic upgrade head --sql`: the SQL for a database administrator."""
    context.configure(dialect_name="postgresql", target_metadata=metadata, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()


if context.is_offline_mode():
    run_offline()
else:
    run_online()
