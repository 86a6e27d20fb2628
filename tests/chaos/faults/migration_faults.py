"""The schema of a next release under running services of this one, and back. Knows Alembic's
command line."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.faults.fault import Broken, Fault, Simple, hold
from tests.chaos.faults.postgres_faults import session
from tests.chaos.stack.local_target import LocalTarget
from tests.repository import REPOSITORY

CONFIG = Path(__file__).parent / "next_release" / "alembic.ini"
MAX_UNANSWERED = 1
"""Sends of one request, while nothing but a migration is under way: it may meet a lock once."""

PATIENCE_S = 180.0
"""A migration runs beside a stack under load, which holds locks."""

VERSION = "SELECT version_num FROM shardline_version"


def there_and_back(target: LocalTarget, rng: random.Random) -> None:
    """Up while a stranger's transaction is in the way; old workers work on the new schema; down
    again."""
    with doors_open(target):
        old = version(target)
        with session(target) as stranger, stranger.transaction():
            stranger.execute("SELECT count(*) FROM jobs")
            upgrade = alembic(target, "upgrade", "head")
            _wait_until_it_steps_back(upgrade)
        must_end(upgrade)
        hold(2 * target.times.lease_s)
        must_end(alembic(target, "downgrade", old))


def cut_short(target: LocalTarget, rng: random.Random) -> None:
    """An operator's process is killed at any moment on the way up, and started again; then down."""
    with doors_open(target):
        old = version(target)
        first = alembic(target, "upgrade", "head")
        hold(rng.uniform(0.5, 3.0))
        first.kill()
        first.wait()
        must_end(alembic(target, "upgrade", "head"))
        must_end(alembic(target, "downgrade", old))


def version(target: LocalTarget) -> str:
    """The newest step of the running release."""
    with session(target) as connection:
        return str(connection.execute(VERSION).fetchall()[0][0])


def alembic(target: LocalTarget, *arguments: str) -> subprocess.Popen[str]:
    """The operator's command, with the release that there is not."""
    return subprocess.Popen(
        [sys.executable, "-m", "alembic", "-c", str(CONFIG), *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **target.stack.settings, "SHARDLINE_DATABASE_URL": target.database_url},
        stderr=subprocess.PIPE,
        text=True,
    )


def must_end(migration: subprocess.Popen[str]) -> None:
    """In time, with success."""
    try:
        _, errors = migration.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        migration.kill()
        _, errors = migration.communicate()
    if migration.returncode != 0:
        raise Broken(f"a migration ended with {migration.returncode}: {errors[-500:]}")


@contextmanager
def doors_open(target: LocalTarget) -> Iterator[None]:
    """Whoever asks meanwhile is taken at the second time at the latest."""
    before = target.journal.everything()
    yield
    # Not by their ids: that of a request with a key becomes another one as its row is known.
    known = set(map(id, before))
    new = [each for each in target.journal.everything() if id(each) not in known]
    refused = [each for each in new if each.num_unanswered > MAX_UNANSWERED]
    if refused:
        raise Broken(
            f"{len(refused)} requests had no answer more than {MAX_UNANSWERED} times,"
            f" such as {refused[0]}"
        )


def _wait_until_it_steps_back(migration: subprocess.Popen[str]) -> None:
    """Or ends: then it did not need the lock."""
    assert migration.stderr is not None
    migration.stderr.readline()


FAULTS: tuple[Fault, ...] = (
    Simple(kind="migration: to the next release and back", inject=there_and_back),
    Simple(kind="migration: cut short and tried again", inject=cut_short),
)
