"""Alembic's entry: runs migrations against `SHARDLINE_DATABASE_URL`, while services use the
database. Owns no schema; that is shardline.contract.tables, audit_table, response_table,
batch_tables, schedule_tables and webhook_tables."""

from __future__ import annotations

import re
import sys

from alembic import context
from alembic.script import ScriptDirectory
from psycopg.errors import DeadlockDetected, LockNotAvailable
from sqlalchemy import Connection, Engine, inspect
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
from shardline.base.errors import Invalid
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

VERSION_TABLE = "shardline_version"
"""Not Alembic's default name: an app may keep its own revision under that, in this schema."""

FORMER_TABLE = "alembic_version"
"""Where releases up to 0.1 noted our revision."""

FIRST_TABLES = frozenset({"models", "pipelines", "tenants", "jobs", "attempts", "results"})
"""Those of revision 0001. An app's revisions may have our form, but its schema has not all of
these."""

MOVE = (
    """
    CREATE TABLE shardline_version (
        version_num varchar(32) NOT NULL,
        CONSTRAINT shardline_version_pkc PRIMARY KEY (version_num))
    """,
    "INSERT INTO shardline_version VALUES (%(revision)s)",
    "DELETE FROM alembic_version WHERE version_num = %(revision)s",
)
"""The table as Alembic makes it."""

REVISION = re.compile(r"[0-9]{4}")
"""The form of our revisions, also of those that later releases add."""

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
    with refusing(), _connected(engine) as connection:
        patient(_migrate, connection)


def run_offline() -> None:
    """`alembic upgrade head --sql`: the SQL for a database administrator."""
    context.configure(
        dialect_name="postgresql",
        target_metadata=METADATA,
        literal_binds=True,
        version_table=VERSION_TABLE,
    )
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


def _connected(engine: Engine) -> Connection:
    """Returns the migration's connection. Ends the process with the server's reason if there is
    none."""
    try:
        return engine.connect()
    except DBAPIError as error:
        sys.stderr.write(f"postgres unreachable: {error.orig}\n")
        raise SystemExit(1) from error


def _migrate(connection: Connection) -> None:
    # Asked again and again instead of waited for: CREATE INDEX CONCURRENTLY waits for every
    # statement that runs.
    if not connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({LOCK})").scalar_one():
        connection.rollback()
        raise Busy("another migration runs")
    connection.commit()
    _take_over(connection)
    context.configure(
        connection=connection,
        target_metadata=METADATA,
        compare_server_default=True,
        transaction_per_migration=True,
        version_table=VERSION_TABLE,
    )
    if _is_ahead(connection):
        sys.stderr.write("the database is of a later release: there is nothing to add\n")
        return
    with context.begin_transaction():
        context.run_migrations()


def _take_over(connection: Connection) -> None:
    """Moves the revision that a former release noted, in one transaction. What an app notes in the
    same table stays."""
    tables = set(inspect(connection).get_table_names())
    if VERSION_TABLE in tables or not FIRST_TABLES | {FORMER_TABLE} <= tables:
        connection.rollback()
        return
    # Nobody adds a row before the table is dropped.
    connection.exec_driver_sql("LOCK TABLE alembic_version IN ACCESS EXCLUSIVE MODE")
    noted = set(connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalars())
    ours = noted & _known_revisions()
    if len(ours) > 1:
        raise Invalid(
            "database_url",
            f"its table {FORMER_TABLE} holds {_listed(ours)}, which all may be Shardline's",
            "Delete those of your app for this upgrade, and insert them again after it",
        )
    for revision in ours:
        for statement in MOVE:
            connection.exec_driver_sql(statement, {"revision": revision})
        if noted == ours:
            connection.exec_driver_sql("DROP TABLE alembic_version")
    connection.commit()


def _is_ahead(connection: Connection) -> bool:
    """Whoever goes back to an earlier release starts it on the later schema, as a rolling upgrade
    does. Raises Invalid for a revision that is of no release."""
    migration = context.get_context()
    unknown = set(migration.get_current_heads()) - _known_revisions()
    connection.rollback()
    if strange := {revision for revision in unknown if not REVISION.fullmatch(revision)}:
        raise Invalid(
            "database_url",
            f"its table {VERSION_TABLE} holds {_listed(strange)}, no revision of Shardline",
            "Write the last revision there that was applied, or name another database",
        )
    return migration.opts.get("destination_rev") == "head" and bool(unknown)


def _known_revisions() -> set[str]:
    return {step.revision for step in ScriptDirectory.from_config(context.config).walk_revisions()}


def _listed(revisions: set[str]) -> str:
    return ", ".join(map(repr, sorted(revisions)))


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
