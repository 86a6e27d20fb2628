"""Alembic's entry: runs migrations against `SHARDLINE_DATABASE_URL`, while services use the
database. Owns no schema; that is shardline.contract.tables, audit_table, response_table,
batch_tables, schedule_tables and webhook_tables."""

from __future__ import annotations

import sys

from alembic import context
from alembic.script import ScriptDirectory
from psycopg.errors import DeadlockDetected, LockNotAvailable
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_delay,
    wait_exponential,
    wait_random,
)

from shardline.base.config import Settings
from shardline.contract.audit_table import audit
from shardline.contract.batches.batch_tables import batches
from shardline.contract.response_table import responses
from shardline.contract.schedules.schedule_tables import schedules
from shardline.contract.webhooks.webhook_tables import webhook_endpoints
from shardline.store.connection.database import connect
from shardline_server.refusals import refusing

LOCK = 7_305_793_411
"""Advisory lock: of two migrations at once one waits for the other."""

(METADATA,) = {
    table.metadata for table in (audit, batches, responses, schedules, webhook_endpoints)
}
"""One for all tables: whole once each module that has some is imported."""

PATIENCE_S = 600.0
"""A lock that is not to be had for so long is somebody's business: the migration fails and says
so."""


class Busy(Exception):
    """Another migration runs."""


def run_online() -> None:
    """Each step is a transaction of its own; one that gets no lock is undone, and tried again after
    a pause."""
    patient = Retrying(
        retry=retry_if_exception(_is_locked),
        wait=wait_exponential(min=1, max=30) + wait_random(0, 1),
        stop=stop_after_delay(PATIENCE_S),
        before_sleep=_say,
        reraise=True,
    )
    with refusing():
        engine = _engine()
    with engine.connect() as connection:
        patient(_migrate, connection)


def run_offline() -> None:
    """`alembic upgrade head --sql`: the SQL for a database administrator."""
    context.configure(dialect_name="postgresql", target_metadata=METADATA, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()


def _engine() -> Engine:
    """Whoever waits for a table's lock keeps all others off it: never so long that a head could
    lose its lease."""
    settings = Settings()
    return connect(
        settings.database_url.get_secret_value(),
        poolclass=NullPool,
        application_name="shardline-migrate",
        statement_timeout_s=0,
        lock_timeout_s=settings.times.fence_margin_s,
    )


def _migrate(connection: Connection) -> None:
    # Asked again and again instead of waited for: CREATE INDEX CONCURRENTLY waits for every
    # statement that runs.
    if not connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({LOCK})").scalar_one():
        connection.rollback()
        raise Busy("another migration runs")
    connection.commit()
    context.configure(
        connection=connection,
        target_metadata=METADATA,
        compare_server_default=True,
        transaction_per_migration=True,
    )
    if _is_ahead(connection):
        sys.stderr.write("the database is of a later release: there is nothing to add\n")
        return
    with context.begin_transaction():
        context.run_migrations()


def _is_ahead(connection: Connection) -> bool:
    """Whoever goes back to an earlier release starts it on the later schema, as a rolling upgrade
    does."""
    migration = context.get_context()
    known = {step.revision for step in ScriptDirectory.from_config(context.config).walk_revisions()}
    current = set(migration.get_current_heads())
    connection.rollback()
    return migration.opts.get("destination_rev") == "head" and not current <= known


def _is_locked(error: BaseException) -> bool:
    cause = error.orig if isinstance(error, DBAPIError) else error
    return isinstance(cause, Busy | LockNotAvailable | DeadlockDetected)


def _say(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    cause = str(getattr(error, "orig", None) or error).splitlines()[0]
    sys.stderr.write(f"{cause}; trying again in {state.upcoming_sleep:.0f} s\n")


if context.is_offline_mode():
    run_offline()
else:
    run_online()
