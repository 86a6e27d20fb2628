"""A migration of a database that is in use: rows of before and after it, locks that others hold,
doors that go on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest

from tests.integration.migrations.test_migrations import INDEXES, alembic
from tests.polling import until
from tests.repository import REPOSITORY

OLD = "0001"
NEW = "0002"
HEAD = max(
    path.name.partition("_")[0]
    for path in (REPOSITORY / "migrations" / "versions").glob("[0-9]*.py")
)
PLAIN_INSERT = "INSERT INTO jobs (model, prompt) VALUES ('m', %s)"
DEAD = """
UPDATE jobs
SET state = 'failed', finished_at = now(), error = '{"code": "crashed"}', replay_of = id
WHERE prompt = %s
"""
PROMPTS = "SELECT prompt FROM jobs ORDER BY prompt"
WAITING = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE application_name = 'shardline-migrate' AND wait_event_type = 'Lock'"
)
NEXT_RELEASE = REPOSITORY / "tests" / "chaos" / "faults" / "next_release" / "alembic.ini"
VERSION = "SELECT version_num FROM shardline_version"
INVALID = "SELECT count(*) FROM pg_index WHERE NOT indisvalid"


@pytest.fixture
def producer(empty_database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """A producer of its own, with plain SQL, on a database of the old schema."""
    alembic(empty_database_url, "upgrade", OLD)
    with closing(psycopg.connect(empty_database_url, autocommit=True)) as connection:
        yield connection


@contextmanager
def migrating(database_url: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The operator's command, under way; it must succeed in the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "alembic", *arguments],
        cwd=REPOSITORY,
        # Short times: a lock is waited for as long as a head's lease can spare.
        env={**os.environ, "SHARDLINE_DATABASE_URL": database_url, "SHARDLINE_TIME_SCALE": "0.05"},
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


def column(connection: psycopg.Connection[Any], query: str) -> list[Any]:
    return [row[0] for row in connection.execute(query)]


def test_jobs_inserted_by_sql_survive_upgrade_and_downgrade(
    empty_database_url: str, producer: psycopg.Connection[Any]
) -> None:
    old_indexes = column(producer, INDEXES)
    for place, step in enumerate((("upgrade", NEW), ("downgrade", OLD), ("upgrade", NEW))):
        producer.execute(PLAIN_INSERT, (f"{place} before",))
        producer.execute(DEAD, (f"{place} before",))
        alembic(empty_database_url, *step)
        producer.execute(PLAIN_INSERT, (f"{place} after",))
        assert (column(producer, INDEXES) == old_indexes) == (step[1] == OLD)
    assert column(producer, PROMPTS) == [
        f"{place} {when}" for place in range(3) for when in ("after", "before")
    ]


def test_a_producers_open_transaction_leaves_no_broken_index_and_blocks_nobody(
    empty_database_url: str, producer: psycopg.Connection[Any]
) -> None:
    with closing(psycopg.connect(empty_database_url)) as slow:
        slow.execute(PLAIN_INSERT, ("slow",))
        with migrating(empty_database_url, "upgrade", NEW):
            until(lambda: column(producer, WAITING) == [1])
            producer.execute("SET lock_timeout = '1s'")
            producer.execute(PLAIN_INSERT, ("meanwhile",))
            slow.commit()
    assert column(producer, PROMPTS) == ["meanwhile", "slow"]
    assert column(producer, INVALID) == [0]


def test_a_retried_migration_rebuilds_its_half_made_index(
    empty_database_url: str, producer: psycopg.Connection[Any]
) -> None:
    with closing(psycopg.connect(empty_database_url)) as slow:
        slow.execute(PLAIN_INSERT, ("slow",))
        cut_short = subprocess.Popen(
            [sys.executable, "-m", "alembic", "upgrade", NEW],
            cwd=REPOSITORY,
            env={**os.environ, "SHARDLINE_DATABASE_URL": empty_database_url},
        )
        until(lambda: column(producer, INVALID) == [1])
        cut_short.kill()
        cut_short.wait()
    alembic(empty_database_url, "upgrade", NEW)
    assert column(producer, INVALID) == [0]


def test_two_concurrent_migrations_of_indexes_do_not_deadlock(
    empty_database_url: str, producer: psycopg.Connection[Any]
) -> None:
    with (
        migrating(empty_database_url, "upgrade", NEW),
        migrating(empty_database_url, "upgrade", NEW),
    ):
        pass
    assert column(producer, INVALID) == [0]


def test_a_migration_steps_back_from_a_table_that_a_reader_holds(
    empty_database_url: str, producer: psycopg.Connection[Any]
) -> None:
    alembic(empty_database_url, "upgrade", NEW)
    with closing(psycopg.connect(empty_database_url)) as reader:
        reader.execute(PROMPTS)
        with migrating(empty_database_url, "-c", str(NEXT_RELEASE), "upgrade", "9001") as migration:
            assert migration.stderr is not None
            assert "lock timeout" in migration.stderr.readline()
            producer.execute(PLAIN_INSERT, ("meanwhile",))
            reader.rollback()
    assert column(producer, "SELECT label FROM jobs") == ["none"]


def test_an_earlier_release_leaves_a_later_schema_alone(
    empty_database_url: str, producer: psycopg.Connection[Any]
) -> None:
    alembic(empty_database_url, "-c", str(NEXT_RELEASE), "upgrade", "head")
    version = column(producer, VERSION)
    alembic(empty_database_url, "upgrade", "head")
    assert column(producer, VERSION) == version
    alembic(empty_database_url, "-c", str(NEXT_RELEASE), "downgrade", HEAD)
    alembic(empty_database_url, "upgrade", "head")
    assert column(producer, VERSION) == [HEAD]
