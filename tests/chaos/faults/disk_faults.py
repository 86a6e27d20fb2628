"""No room on the disk of Postgres, of Redis, or of the services' logs. What was accepted stays,
what cannot be accepted is refused clearly, and with room again all goes on; Postgres may need a
start, as after any of its panics."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import httpx
import psutil
import psycopg
import redis

from tests.chaos.faults.fault import Broken, Fault, NotInjected, Simple, hold
from tests.chaos.faults.postgres_faults import session
from tests.chaos.faults.redis_faults import client
from tests.chaos.load.doors import gateway_client
from tests.chaos.load.journal import Asked
from tests.chaos.stack.local_target import LocalTarget
from tests.polling import within

LEASES = 1.5
NOTICE_S = 20.0
"""For a server to meet the full disk, and to notice that there is room again."""

START_S = 60.0
"""Until a process that is started again has something to log."""

RECOVERY_S = 5.0
"""For Postgres to come back by itself: there is little to recover."""

ASK_S = 0.25
PATIENCE_S = 15.0
BUSY = frozenset({429, 503})
"""How a door says: not now."""

KILLABLE = ("stage", "relay", "gateway")


@contextmanager
def full(target: LocalTarget, folder: Path) -> Iterator[None]:
    """No room under this folder meanwhile. Raises NotInjected if nobody needed any."""
    before = target.disk.num_refused
    target.disk.fill(folder)
    try:
        yield
    finally:
        target.disk.free()
    if target.disk.num_refused == before:
        raise NotInjected(f"nobody wrote below {folder.name}")


def under_postgres(part: str) -> Callable[[LocalTarget, random.Random], None]:
    """One of its folders; the gateway is asked all the time."""

    def inject(target: LocalTarget, rng: random.Random) -> None:
        try:
            with full(target, target.postgres.data / part):
                _ask_at_the_door(target, rng)
        finally:
            _revive(target)

    return inject


def under_snapshots(target: LocalTarget, rng: random.Random) -> None:
    """A snapshot fails, so Redis refuses writes until one succeeds."""
    folder = Path(target.redis.home) / "redis"
    with client(target) as connection:
        connection.config_set("save", "3600 1")
        try:
            with full(target, folder):
                _snapshot(connection, "err")
                hold(LEASES * target.times.lease_s)
            _snapshot(connection, "ok")
        finally:
            connection.config_set("save", "")
            (folder / "dump.rdb").unlink(missing_ok=True)


def under_append_only_file(target: LocalTarget, rng: random.Random) -> None:
    """Its append-only file cannot grow, so Redis refuses writes until it can."""
    folder = Path(target.redis.home) / "redis"
    with client(target) as connection:
        connection.config_set("appendonly", "yes")
        try:
            _wait_until_it_says(
                connection, aof_rewrite_in_progress=0, aof_rewrite_scheduled=0, aof_enabled=1
            )
            with full(target, folder):
                _wait_until_it_says(connection, aof_last_write_status="err")
                hold(LEASES * target.times.lease_s)
            _wait_until_it_says(connection, aof_last_write_status="ok")
        finally:
            connection.config_set("appendonly", "no")
            shutil.rmtree(folder / "appendonlydir", ignore_errors=True)


def under_services(part: str) -> Callable[[LocalTarget, random.Random], None]:
    """A process dies meanwhile, so that there is something to log and to record."""

    def inject(target: LocalTarget, rng: random.Random) -> None:
        name, pid = target.pick(rng, rng.choice(KILLABLE))
        with full(target, target.stack.home.folder / part):
            before = target.disk.num_refused
            psutil.Process(pid).kill()
            within(START_S, lambda: target.disk.num_refused > before)
            hold(LEASES * target.times.lease_s)
        if not within(NOTICE_S, lambda: target.pids().get(name, pid) != pid):
            raise Broken(f"{name} is not started again, or up.json does not say so")

    return inject


def _ask_at_the_door(target: LocalTarget, rng: random.Random) -> None:
    """For some leases. Whatever the database can do, the gateway stores, or says that it cannot
    now."""
    until_s = time.monotonic() + LEASES * target.times.lease_s
    with gateway_client(target.urls, PATIENCE_S) as gateway:
        while time.monotonic() < until_s:
            asked = target.journal.ask(
                Asked(id=uuid4(), number=target.workload.draw(rng), door="http")
            )
            fields = target.workload.dressed(asked.number, asked.dress)
            document = {**fields, "id": str(asked.id)}
            try:
                answer = gateway.post("/v1/jobs", json=document)
            except httpx.TimeoutException:
                continue
            if not answer.is_success and answer.status_code not in BUSY:
                raise Broken(f"the gateway answered {answer.status_code}: {answer.text[:300]}")
            asked.promised |= answer.is_success
            hold(ASK_S)


def _revive(target: LocalTarget) -> None:
    """It panics without room for its log, and recovers by itself. What died while it recovered must
    be started by somebody; so must a postmaster of release 18, which may wait for ever for a
    startup process that is gone."""
    if target.postgres.is_running() and within(RECOVERY_S, lambda: _is_up(target)):
        return
    target.postgres.restart()
    if not within(NOTICE_S, lambda: _is_up(target)):
        raise NotInjected("Postgres does not come up again")


def _is_up(target: LocalTarget) -> bool:
    try:
        with session(target):
            return True
    except psycopg.OperationalError:
        return False


def _snapshot(connection: redis.Redis, status: str) -> None:
    """Ask for one; it must end like this."""
    connection.bgsave()
    _wait_until_it_says(connection, rdb_bgsave_in_progress=0, rdb_last_bgsave_status=status)


def _wait_until_it_says(connection: redis.Redis, **wanted: str | int) -> None:
    if not within(NOTICE_S, lambda: wanted.items() <= connection.info("persistence").items()):
        raise NotInjected(f"Redis does not come to {wanted}")


def why_not(target: LocalTarget) -> str | None:
    """As the library's build said."""
    return target.disk.why_not


def _faults() -> Iterator[Fault]:
    injections: dict[str, tuple[Callable[[LocalTarget, random.Random], None], bool]] = {
        "under Postgres's log": (under_postgres("pg_wal"), True),
        "under Postgres's tables": (under_postgres("base"), False),
        "under all of Postgres": (under_postgres(""), True),
        "under Redis's snapshots": (under_snapshots, False),
        "under Redis's append-only file": (under_append_only_file, False),
        "under the services' logs": (under_services("logs"), True),
        "under the services' folder": (under_services(""), True),
    }
    for words, (inject, is_kill) in injections.items():
        yield Simple(kind=f"disk: full {words}", inject=inject, is_kill=is_kill, why_not=why_not)


FAULTS: tuple[Fault, ...] = tuple(_faults())
