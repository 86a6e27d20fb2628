"""Our revision beside that of an app with Alembic in the same schema, and where a former release
noted ours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

from tests.integration.migrations.test_migrations import alembic
from tests.repository import REPOSITORY

HEAD = max(
    path.name.partition("_")[0]
    for path in (REPOSITORY / "migrations" / "versions").glob("[0-9]*.py")
)
OURS = "SELECT version_num FROM shardline_version"
APPS = "SELECT version_num FROM alembic_version ORDER BY 1"
NOTED = "SELECT to_regclass('alembic_version')::text"
APP_TABLE = "CREATE TABLE alembic_version (version_num varchar(32) CONSTRAINT {} PRIMARY KEY)"
APP_NOTES = "INSERT INTO alembic_version VALUES (%s)"
FORMER_RELEASE = (
    "ALTER TABLE shardline_version RENAME TO alembic_version;"
    "ALTER TABLE alembic_version"
    " RENAME CONSTRAINT shardline_version_pkc TO alembic_version_pkc"
)


@pytest.fixture
def database(empty_database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """The same database, for plain SQL."""
    with closing(psycopg.connect(empty_database_url, autocommit=True)) as connection:
        yield connection


def column(database: psycopg.Connection[Any], query: str) -> list[Any]:
    return [row[0] for row in database.execute(query)]


def app_migrates(database: psycopg.Connection[Any], revision: str) -> None:
    """What an app's Alembic does to its table."""
    database.execute(APP_TABLE.format("alembic_version_pkc"))
    database.execute(APP_NOTES, (revision,))


@pytest.mark.parametrize("revision", ["5f2e4c1b9a70", "0005", HEAD])
def test_an_apps_revision_beside_ours_changes_nothing(
    empty_database_url: str, database: psycopg.Connection[Any], revision: str
) -> None:
    app_migrates(database, revision)
    for _ in range(2):
        alembic(empty_database_url, "upgrade", "head")
        assert (column(database, OURS), column(database, APPS)) == ([HEAD], [revision])


def test_an_app_may_come_with_alembic_after_ours(
    empty_database_url: str, database: psycopg.Connection[Any]
) -> None:
    alembic(empty_database_url, "upgrade", "head")
    assert column(database, NOTED) == [None]
    app_migrates(database, "0036")
    alembic(empty_database_url, "upgrade", "head")
    assert (column(database, OURS), column(database, APPS)) == ([HEAD], ["0036"])


@pytest.mark.parametrize("noted", ["0036", HEAD])
def test_a_former_releases_revision_is_taken_over(
    empty_database_url: str, database: psycopg.Connection[Any], noted: str
) -> None:
    alembic(empty_database_url, "upgrade", noted)
    database.execute(FORMER_RELEASE)
    alembic(empty_database_url, "upgrade", "head")
    assert (column(database, OURS), column(database, NOTED)) == ([HEAD], [None])
    app_migrates(database, "5f2e4c1b9a70")
    alembic(empty_database_url, "downgrade", "base")
    assert (column(database, OURS), column(database, APPS)) == ([], ["5f2e4c1b9a70"])


def test_taking_over_leaves_an_apps_row(
    empty_database_url: str, database: psycopg.Connection[Any]
) -> None:
    alembic(empty_database_url, "upgrade", "head")
    database.execute(FORMER_RELEASE)
    database.execute(APP_NOTES, ("5f2e4c1b9a70",))
    alembic(empty_database_url, "upgrade", "head")
    assert (column(database, OURS), column(database, APPS)) == ([HEAD], ["5f2e4c1b9a70"])


@pytest.mark.parametrize("database_of", ["former release", "this release"])
def test_a_revision_that_may_not_be_ours_is_refused(
    empty_database_url: str, database: psycopg.Connection[Any], database_of: str
) -> None:
    alembic(empty_database_url, "upgrade", "head")
    if database_of == "former release":
        database.execute(FORMER_RELEASE)
        database.execute(APP_NOTES, ("0005",))
    else:
        database.execute("UPDATE shardline_version SET version_num = '5f2e4c1b9a70'")
    done = subprocess.run(
        [sys.executable, "-m", "alembic", "upgrade", "head"],
        cwd=REPOSITORY,
        env={**os.environ, "SHARDLINE_DATABASE_URL": empty_database_url},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "SHARDLINE_DATABASE_URL: its table" in done.stderr


def test_a_revision_of_a_later_release_is_left_alone(
    empty_database_url: str, database: psycopg.Connection[Any]
) -> None:
    alembic(empty_database_url, "upgrade", "head")
    database.execute("UPDATE shardline_version SET version_num = '0999'")
    alembic(empty_database_url, "upgrade", "head")
    assert column(database, OURS) == ["0999"]
