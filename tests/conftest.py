"""Real servers: one Postgres and one Valkey per session, a fresh database and an empty Redis per
test."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import psycopg
import pytest
import redis
from hypothesis import HealthCheck, settings
from psycopg import sql

from services.standalone.servers import FAST, Postgres, Valkey
from tests.filled_scheduling import FILLING, FilledScheduling, stand_back
from tests.repository import REPOSITORY
from tests.stack import no_foreign_settings

TEMPLATE = "shardline_template"

SHARED_STACKS = ("real_stack",)
"""Fixtures of packages that one worker of pytest-xdist has. Tests of `hurt` take ten minutes: each
worker that runs some of their files has its own."""

MAX_LOGS = 8
LOG_LINES = 40
"""Shown of a process's log after its test failed: each of the newest logs, its last lines."""

LARGE_BYTES = 1 << 30
"""Of a test process that looks for memory to give back."""

# Triton reads it once, when it is imported, which transformers does for any test. On a GPU kernels
# are compiled.
if "SHARDLINE_TEST_DEVICE" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"

# A thread for each process of tests, which are more than cores. Stages set their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests that compute beside a stack are no services: its stages do not stand back behind them.
os.environ.setdefault("SHARDLINE_NICE", "0")

# The same examples in every run, and none of them timed: what a change did not touch cannot fail
# it. `pytest --hypothesis-profile=explore` draws new ones, and more.
settings.register_profile(
    "steady",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile(
    "explore", settings.get_profile("steady"), derandomize=False, max_examples=2000
)
settings.load_profile("steady")


def pytest_configure() -> None:
    """Has the worker that computes beside stacks leave the cores to them."""
    stand_back()


def pytest_collection_finish() -> None:
    """What tests import lives as long as the process: collections need not look through it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilledScheduling | None:
    """The scheduler of `make test`; None: pytest-xdist has the one that was asked for."""
    is_grouped = config.getoption("dist") == "loadgroup"
    return FilledScheduling(config, log) if is_grouped else None


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker of pytest-xdist runs a file as a whole, and all files that share a stack; the
    tests of a long file may have groups of their own. Files that share a stack come first, stacks
    whose leases are seconds late, and files that only compute last: see `filled_scheduling`."""
    sharing = {
        _file(item): name
        for item in items
        for name in SHARED_STACKS
        if isinstance(item, pytest.Function) and name in item.fixturenames
    }
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(sharing.get(_file(item), _file(item))))
    items.sort(
        key=lambda item: (
            _filling_place(item),
            item.get_closest_marker("short_leases") is not None,
            _file(item) not in sharing,
        )
    )


def _filling_place(item: pytest.Item) -> int:
    """Where the file's folder stands among those that fill; -1 for every other."""
    places = (place for place, folder in enumerate(FILLING) if _file(item).startswith(folder))
    return next(places, -1)


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


@pytest.fixture(autouse=True, scope="session")
def _no_foreign_settings() -> None:
    """Tests use their own servers only."""
    no_foreign_settings()


@pytest.fixture(autouse=True, scope="module")
def _same_cores_afterwards() -> Iterator[None]:
    """A file leaves the process every core that it found: stacks of later files share them."""
    cores = os.sched_getaffinity(0)
    yield
    assert os.sched_getaffinity(0) == cores


@pytest.fixture(autouse=True, scope="module")
def _no_garbage_afterwards() -> Iterator[None]:
    """A file gives back the memory that it took. Models are freed in any order, and glibc keeps
    what is free between blocks that are not: a process of the whole suite would grow to 5 GiB."""
    yield
    if psutil.Process().memory_info().rss > LARGE_BYTES:
        gc.collect()
        with suppress(AttributeError):  # not in every libc
            ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="session")
def server_home() -> Iterator[Path]:
    """A folder of this session alone, with a path short enough for sockets."""
    home = Path(tempfile.mkdtemp(prefix="shardline-test-"))
    yield home
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_server(server_home: Path) -> Iterator[Postgres]:
    """This session's Postgres. A test that kills it starts it again before it ends."""
    server = Postgres(server_home, settings=FAST)
    try:
        server.start()
        yield server
    finally:
        server.abandon()


@pytest.fixture(scope="session")
def postgres_url(postgres_server: Postgres) -> str:
    """The server's maintenance database: for tests that make databases themselves."""
    return postgres_server.url("postgres")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed shows what its processes said: a log file is gone with the machine."""
    report = yield
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if report.failed and folder is not None:
        newest = sorted(folder.rglob("*.log"), key=lambda log: -log.stat().st_mtime)[:MAX_LOGS]
        for log in newest:
            lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            report.sections.append((f"{log.relative_to(folder)}", "\n".join(lines)))
    return report


@pytest.fixture(scope="session")
def template_database(postgres_server: Postgres, postgres_url: str) -> str:
    """A database migrated once by Alembic; each test gets a copy, which costs a tenth of a
    migration."""
    _execute(postgres_url, sql.SQL("CREATE DATABASE {}").format(sql.Identifier(TEMPLATE)))
    if (REPOSITORY / "migrations" / "env.py").exists():
        migrate(postgres_server.url(TEMPLATE))
    return TEMPLATE


@pytest.fixture
def empty_database_url(postgres_server: Postgres, postgres_url: str) -> Iterator[str]:
    """A fresh database without any table: for tests of the migrations themselves."""
    yield from _database(postgres_server, postgres_url, template="template0")


@pytest.fixture
def database_url(
    postgres_server: Postgres, postgres_url: str, template_database: str
) -> Iterator[str]:
    """A fresh, migrated database for one test."""
    yield from _database(postgres_server, postgres_url, template=template_database)


@pytest.fixture(scope="session")
def _session_redis(server_home: Path) -> Iterator[Valkey]:
    server = Valkey(server_home)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
def redis_server(_session_redis: Valkey) -> Iterator[Valkey]:
    """This session's Valkey, empty: `kill()`, `pause()`, `resume()`, `restart()` (empty, same
    port). It is repaired after a test that leaves it dead or paused."""
    _empty(_session_redis)
    yield _session_redis
    if _session_redis.is_running():
        _session_redis.resume()
    else:
        _session_redis.restart()


@pytest.fixture
def redis_url(redis_server: Valkey) -> str:
    """An empty Redis for one test."""
    return redis_server.url


def migrate(database_url: str) -> None:
    """Bring a database to the newest version, in a process of its own as operators do."""
    subprocess.run(
        [sys.executable, "-m", "alembic", "upgrade", "head"],
        cwd=REPOSITORY,
        env={**os.environ, "SHARDLINE_DATABASE_URL": database_url},
        check=True,
        capture_output=True,
    )


def _database(server: Postgres, maintenance_url: str, *, template: str) -> Iterator[str]:
    name = f"test_{uuid4().hex}"
    fresh = sql.Identifier(name)
    original = sql.Identifier(template)
    _execute(
        maintenance_url,
        sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy").format(fresh, original),
    )
    yield server.url(name)
    _execute(maintenance_url, sql.SQL("DROP DATABASE {} WITH (FORCE)").format(fresh))


def _execute(url: str, statement: sql.Composed) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)


def _empty(server: Valkey) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
