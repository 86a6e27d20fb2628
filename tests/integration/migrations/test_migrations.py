"""Migrations on a real Postgres: up, down, up again, and the same schema as the tables say."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from sqlalchemy import Engine, make_url, text

from shardline.contract.audit_table import audit
from shardline.contract.batches.batch_tables import batches
from shardline.contract.response_table import responses
from shardline.contract.schedules.schedule_tables import schedules
from shardline.contract.webhooks.webhook_tables import webhook_endpoints
from shardline.store.connection.database import connect
from tests.repository import REPOSITORY

CONSTRAINTS = """
SELECT conrelid::regclass || ' ' || conname || ' ' || pg_get_constraintdef(oid)
FROM pg_constraint
WHERE connamespace = 'public'::regnamespace AND conrelid::regclass::text <> 'shardline_version'
ORDER BY 1
"""
INDEXES = (
    "SELECT indexdef FROM pg_indexes"
    " WHERE schemaname = 'public' AND tablename <> 'shardline_version' ORDER BY 1"
)
COLUMNS = """
SELECT table_name || '.' || column_name || ' ' || data_type || ' ' || is_nullable || ' '
    || coalesce(column_default, '')
FROM information_schema.columns JOIN information_schema.tables USING (table_schema, table_name)
WHERE table_schema = 'public' AND table_name <> 'shardline_version' AND table_type = 'BASE TABLE'
ORDER BY 1
"""

VIEWS = "SELECT viewname FROM pg_views WHERE schemaname = 'public'"


def run_alembic(database_url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The operator's command, run to its end."""
    return subprocess.run(
        [sys.executable, "-m", "alembic", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "SHARDLINE_DATABASE_URL": database_url},
        capture_output=True,
        text=True,
        check=False,
    )


def alembic(database_url: str, *arguments: str) -> str:
    """What the operator's command prints; it must succeed."""
    done = run_alembic(database_url, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read(engine: Engine, query: str) -> list[str]:
    """One column of text."""
    with engine.connect() as connection:
        return list(connection.scalars(text(query)))


def test_the_migrated_schema_is_what_the_tables_say(database_url: str) -> None:
    assert "No new upgrade operations detected" in alembic(database_url, "check")


FUNCTIONS = """
CREATE FUNCTION shardline_new_id() RETURNS uuid LANGUAGE sql AS 'SELECT gen_random_uuid()';
CREATE FUNCTION shardline_my_tenant(name) RETURNS text LANGUAGE sql STABLE AS 'SELECT $1::text'
"""


@pytest.mark.parametrize(
    "query", [CONSTRAINTS, INDEXES, COLUMNS], ids=["constraints", "indexes", "columns"]
)
def test_tables_created_directly_equal_the_migrated_ones(
    database_url: str, empty_database_url: str, query: str
) -> None:
    direct = connect(empty_database_url)
    assert batches.metadata is responses.metadata is webhook_endpoints.metadata
    assert schedules.metadata is audit.metadata is batches.metadata
    with direct.begin() as connection:
        # Functions are the migrations' own; defaults name these.
        connection.execute(text(FUNCTIONS))
        responses.metadata.create_all(connection)
    migrated = connect(database_url)
    assert read(direct, query) == read(migrated, query)
    direct.dispose()
    migrated.dispose()


def test_migrating_down_and_up_leaves_nothing_and_works_again(empty_database_url: str) -> None:
    engine = connect(empty_database_url)
    alembic(empty_database_url, "upgrade", "head")
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO jobs (model, prompt) VALUES ('m', 'text')"))
    alembic(empty_database_url, "downgrade", "base")
    assert read(engine, COLUMNS) == read(engine, VIEWS) == []
    assert (
        read(engine, "SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace")
        == []
    )
    alembic(empty_database_url, "upgrade", "head")
    assert read(engine, "SELECT id FROM tenants") == ["default"]
    engine.dispose()


def test_two_concurrent_migrations_both_succeed(empty_database_url: str) -> None:
    command = [sys.executable, "-m", "alembic", "upgrade", "head"]
    environment = {**os.environ, "SHARDLINE_DATABASE_URL": empty_database_url}
    both = [subprocess.Popen(command, cwd=REPOSITORY, env=environment) for _ in range(2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]


def test_printing_sql_needs_no_server() -> None:
    assert "CREATE TABLE jobs" in alembic(
        "postgresql://nowhere.invalid/none", "upgrade", "head", "--sql"
    )


def test_a_server_that_lets_nobody_in_is_named_in_one_line(empty_database_url: str) -> None:
    url = make_url(empty_database_url).set(database="nobody_made_it")

    done = run_alembic(url.render_as_string(hide_password=False), "upgrade", "head")

    assert done.returncode == 1
    assert 'database "nobody_made_it" does not exist' in done.stderr
    assert [line[:22] for line in done.stderr.splitlines()] == ["postgres unreachable: "]
