"""What `shardline doctor` looks at: Postgres, Redis, relays, models, the gateway and this machine's
disk. Each check reports what it found and, if that is not right, a remedy. Changes nothing and owns
no SQL."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx
from redis.exceptions import RedisError
from sqlalchemy import Connection

from shardline.base.clock import wall_clock_s
from shardline.base.config import Settings
from shardline.base.errors import Unavailable
from shardline.base.redis import redis_client
from shardline.cli.http_client import http_client
from shardline.cli.local_stack import LocalGateway
from shardline.client.database import reachable
from shardline.store.connection.database import connect
from shardline.store.pipelines import live_pipelines
from shardline.store.schedules.pauses import list_pauses
from shardline.store.statistics.demand import oldest_queued
from shardline.store.statistics.server_state import (
    missing_parts,
    missing_rights,
    num_crashed_lately,
    server_facts,
    unsent_models,
)

LEAST_POSTGRES = 140_000
LEAST_FREE_BYTES = 2 << 30
MOST_CLOCK_S = 2.0
"""Deadlines and delays count by Postgres's clock; people compare times of logs."""
MOST_CONNECTIONS = 0.8
MOST_MEMORY = 0.9
LATE_S = 30.0
"""A due job that is unsent for so long, with nothing of its model sent, has no relay."""
TIMEOUT_S = 5.0
MAX_LISTED = 4


class Verdict(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What one check found."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


def check_all(settings: Settings, gateway: LocalGateway | None) -> Iterator[CheckResult]:
    """Yields the result of each check as it ends; a server that cannot be reached is one."""
    yield from _check_postgres(settings.database_url.get_secret_value())
    yield from _check_redis(settings.redis_url)
    if gateway is not None:
        yield _check_gateway(gateway.url)
    yield _check_disk(Path.cwd())


def _check_postgres(url: str) -> Iterator[CheckResult]:
    engine = connect(url)
    try:
        with reachable(), engine.begin() as connection:
            yield from _check_server(connection)
            missing = missing_parts(connection)
            if missing:
                yield _broken(
                    "schema",
                    f"{_listed(missing)} missing",
                    "Run `alembic upgrade head`, or Compose's `migrate`",
                )
                return
            yield _ok("schema", "has all tables and columns of this version")
            yield from _check_rights(connection)
            yield from _check_work(connection)
    except Unavailable as error:
        yield _broken("postgres", error.problem, "Start it, or correct SHARDLINE_DATABASE_URL")
    finally:
        engine.dispose()


def _check_server(connection: Connection) -> Iterator[CheckResult]:
    before_s = wall_clock_s()
    facts = server_facts(connection)
    ahead_s = facts.now_s - (before_s + wall_clock_s()) / 2
    load = f"{facts.num_connections} of {facts.max_connections} connections"
    found = f"PostgreSQL {facts.version}, {load}"
    if facts.version_num < LEAST_POSTGRES:
        yield _broken("postgres", found, "Upgrade it to 14 or later")
    elif facts.is_standby:
        yield _broken("postgres", f"{found}; a standby, which takes no writes", "Name the primary")
    elif facts.is_read_only:
        remedy = "Set default_transaction_read_only to off for the role, database or server"
        yield _broken("postgres", f"{found}; it takes no writes of this role", remedy)
    elif facts.num_connections > MOST_CONNECTIONS * facts.max_connections:
        yield _warning("postgres", found, "Raise max_connections, or use a pooler")
    else:
        yield _ok("postgres", found)
    yield _clock("postgres", ahead_s)


def _check_rights(connection: Connection) -> Iterator[CheckResult]:
    if lacking := missing_rights(connection):
        remedy = "GRANT them to this role, or connect as the owner of the tables"
        yield _warning("rights", f"this role lacks {', '.join(lacking)}", remedy)
    else:
        yield _ok("rights", "this role reads, submits and cancels jobs")


def _check_work(connection: Connection) -> Iterator[CheckResult]:
    """Relays, models and what died."""
    if late := unsent_models(connection, late_s=LATE_S):
        found = f"jobs of {_listed(late)} have been unsent for over {LATE_S:.0f} s"
        yield _broken("relay", found, "Start a relay, and look at its log")
    else:
        yield _ok("relay", "no job waits to be sent")
    live = live_pipelines(connection)
    waits = oldest_queued(connection)
    if not waits:
        yield _broken("models", "none is registered", "Start the stages of a model")
    for model, wait_s in sorted(waits.items()):
        ready = [each.id for each in live if each.model == model and each.ready]
        if ready:
            yield _ok(f"model {model}", f"ready: {', '.join(ready)}; jobs wait for {wait_s:.0f} s")
        else:
            verdict = Verdict.BROKEN if wait_s > 0 else Verdict.WARNING
            yield CheckResult(
                name=f"model {model}",
                verdict=verdict,
                found=f"no pipeline is ready; jobs wait for {wait_s:.0f} s",
                remedy="Start its stages, and look at their logs; `shardline pipelines` shows some",
            )
    if paused := list_pauses(connection):
        found = _listed([f"{each.kind} {each.target}" for each in paused])
        yield _ok("pauses", f"jobs wait for `shardline resume`: {found}")
    if num_dead := num_crashed_lately(connection):
        yield _warning("crashed jobs", f"{num_dead} in a day", "See `shardline dead list`")


def _check_redis(url: str) -> Iterator[CheckResult]:
    client = redis_client(url, timeout_s=TIMEOUT_S)
    try:
        before_s = wall_clock_s()
        seconds, microseconds = client.time()
        ahead_s = seconds + microseconds / 1e6 - (before_s + wall_clock_s()) / 2
        facts: dict[str, Any] = client.info()
    except RedisError as error:
        problem = str(error).partition("\n")[0]
        yield _broken("redis", problem, "Start it, or correct SHARDLINE_REDIS_URL")
        return
    finally:
        client.close()
    found = f"{facts.get('redis_version', '?')}, {facts.get('used_memory_human', '?')} used"
    most = int(facts.get("maxmemory", 0))
    if facts.get("cluster_enabled"):
        problem = f"{found}; a node of a cluster, which has some of the keys"
        yield _broken("redis", problem, "Name a server without cluster mode")
    elif facts.get("role") == "slave":
        problem = f"{found}; a replica, which takes no writes"
        yield _broken("redis", problem, "Name the primary, or the Sentinels that know it")
    elif str(facts.get("maxmemory_policy", "")).startswith("allkeys-"):
        remedy = "Set maxmemory-policy to volatile-lru or noeviction: it may drop messages"
        yield _warning("redis", f"{found}, {facts['maxmemory_policy']}", remedy)
    elif most and int(facts.get("used_memory", 0)) > MOST_MEMORY * most:
        yield _warning("redis", f"{found} of {most:,} bytes", "Raise maxmemory")
    else:
        yield _ok("redis", found)
    yield _clock("redis", ahead_s)


def _check_gateway(url: str) -> CheckResult:
    began_s = time.monotonic()
    try:
        with http_client(url, timeout_s=TIMEOUT_S) as http:
            status = http.get("health").status_code
    except httpx.HTTPError as error:
        return _broken("gateway", f"{url}: {error}", "Start it, and look at its log")
    found = f"{url} answers {status} after {(time.monotonic() - began_s) * 1e3:.0f} ms"
    if status != httpx.codes.OK:
        return _broken("gateway", found, "Look at its log")
    return _ok("gateway", found)


def _check_disk(folder: Path) -> CheckResult:
    free = shutil.disk_usage(folder).free
    found = f"{free / 2**30:,.1f} GiB are free at {folder}"
    if free < LEAST_FREE_BYTES:
        return _warning("disk", found, "Free some: stages keep weights, logs and parked KV there")
    return _ok("disk", found)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _clock(server: str, ahead_s: float) -> CheckResult:
    name = f"clock of {server}"
    found = f"{ahead_s:+.1f} s from this machine's"
    if abs(ahead_s) > MOST_CLOCK_S:
        return _warning(name, found, "Synchronize both by NTP")
    return _ok(name, found)


def _ok(name: str, found: str) -> CheckResult:
    return CheckResult(name=name, verdict=Verdict.OK, found=found)


def _warning(name: str, found: str, remedy: str) -> CheckResult:
    return CheckResult(name=name, verdict=Verdict.WARNING, found=found, remedy=remedy)


def _broken(name: str, found: str, remedy: str) -> CheckResult:
    return CheckResult(name=name, verdict=Verdict.BROKEN, found=found, remedy=remedy)
