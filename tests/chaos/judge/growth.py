"""I6: what a stack holds after the storm, against what it may hold. Asks the system and the
servers; knows no fault.

A process is warm once it has lived for twice as long as the start of the stack and the undisturbed
pass took. From then on it may grow by HEAP_SHARE of what it had, which allocators keep in pieces,
by LATE_BYTES for what only a fault makes it load, a stage by its KV pool, whose pages count only
once they are used, and Flower by the tasks that it keeps.

Redis may hold, beside what it held before the storm, the streams of jobs, which expire: each of at
most an entry for each token and an end, in each attempt, and once more where the writer heard no
answer. What never expires are queues, marks, bindings, and messages that the dead took (25 of a
kilobyte for each death, for an hour); it is bounded by SCRAP_BYTES, and so are the buffers of
connections.

Postgres has no more connections than the pools of those that run, and no transaction that is older
than a lease.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import psutil
import psycopg
import redis

from services.relay.relay import LOOPS
from services.relay.settings import RelaySettings
from services.standalone.plan import FLOWER_MAX_TASKS
from shardline.contract import keys
from shardline.store.connection.database import POOL_SIZE
from tests.chaos.load.requests import MAX_OUTPUT
from tests.chaos.load.target import Target
from tests.chaos.report.finding import Finding
from tests.chaos.stack.options import KV_MIB
from tests.polling import within

MIB = 1 << 20
LOOK_S = 5.0
QUIET_S = 60.0
HEAP_SHARE = 0.2
LATE_BYTES = 16 * MIB
SCRAP_BYTES = 4 * MIB
TASK_BYTES = 5 << 10
"""Of a task that Flower keeps: 10,000 of them took 42 MiB, once older ones had made room."""
NUM_BELLS = 2
"""At most so many connections of a process LISTEN, beside its pool."""

ENTRIES_PER_ATTEMPT = 2 * (MAX_OUTPUT + 1)
FENCES = "SELECT id::text, fence FROM jobs"
CONNECTIONS = """
SELECT count(*), count(*) FILTER (WHERE xact_start < now() - make_interval(secs => %s))
FROM pg_stat_activity
WHERE backend_type = 'client backend' AND datname = current_database() AND pid <> pg_backend_pid()
"""
LASTING = re.compile(
    rf"{keys.INTAKE}|{keys.OUTBOX_MARK}|{keys.RELAY_UNACKED}.*|unacked.*|_kombu\.binding.*"
    r"|shardline\.(intake|generate|stage)\b.*"
)
"""Keys without a time to live: queues, what was taken from them, who listens where."""


@dataclass(slots=True, kw_only=True)
class Life:
    """One process."""

    name: str
    seen_s: float = 0.0
    """When first."""
    warm_bytes: int | None = None
    last_bytes: int = 0

    @property
    def growth_bytes(self) -> int:
        """Since it was warm."""
        return 0 if self.warm_bytes is None else self.last_bytes - self.warm_bytes

    @property
    def growth_max_bytes(self) -> float:
        """See above."""
        held = {
            "stage": KV_MIB * MIB,
            "worker": KV_MIB * MIB,
            "flower": FLOWER_MAX_TASKS * TASK_BYTES,
        }
        held_bytes = next(
            (each for prefix, each in held.items() if self.name.startswith(prefix)), 0
        )
        return HEAP_SHARE * (self.warm_bytes or 0) + LATE_BYTES + held_bytes


class Memory:
    """Looks at every process of the stack as long as it is entered, and once more at the end."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self._lives: dict[tuple[str, int], Life] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leaving.set()
        self._thread.join()
        if kind is None:
            self._look()

    def _run(self) -> None:
        while not self._leaving.wait(LOOK_S):
            # One that ends while it is looked at is gone.
            with suppress(psutil.NoSuchProcess):
                self._look()

    def _look(self) -> None:
        warming_s = 2 * (self._target.start_s + self._target.calm_s)
        for name, process in self._target.running().items():
            life = self._lives.setdefault(
                (name, process.pid), Life(name=name, seen_s=time.monotonic())
            )
            life.last_bytes = process.rss_bytes
            if life.warm_bytes is None and time.monotonic() - life.seen_s > warming_s:
                life.warm_bytes = life.last_bytes

    @property
    def worst_mb(self) -> float:
        """The growth of the process that grew most."""
        return max((each.growth_bytes / MIB for each in self._lives.values()), default=0.0)

    def findings(self) -> list[Finding]:
        """Those that grew by more than they may."""
        return [
            _growth(
                f"{each.name} grew from {(each.warm_bytes or 0) / MIB:.0f}"
                f" to {each.last_bytes / MIB:.0f} MiB,"
                f" by more than {each.growth_max_bytes / MIB:.0f}"
            )
            for each in self._lives.values()
            if each.growth_bytes > each.growth_max_bytes
        ]


def redis_bytes(redis_url: str) -> int:
    """All that it holds."""
    with _client(redis_url) as client:
        return int(client.info("memory")["used_memory"])


def in_redis(
    redis_url: str, database_url: str, before_bytes: int, *, quiet_s: float = QUIET_S
) -> list[Finding]:
    """Streams that are too long, keys that stay for ever, memory that nothing explains."""
    with _client(redis_url) as client:
        found = (
            []
            if within(quiet_s, lambda: client.xlen(keys.INTAKE) == 0)
            else [f"{keys.INTAKE} is never empty"]
        )
        streams = list(client.scan_iter(keys.job_stream("*")))
        found += [*_long(database_url, client, streams), *_lasting(client)]
        # Refused messages have a limit of their own.
        held_bytes = sum(
            client.memory_usage(key, samples=0) or 0 for key in (*streams, keys.INTAKE_DEAD)
        )
    grown_bytes = redis_bytes(redis_url) - before_bytes - held_bytes
    if grown_bytes > SCRAP_BYTES:
        found.append(
            f"Redis holds {grown_bytes / MIB:.1f} MiB more than before,"
            f" beside {len(streams)} streams"
        )
    return [_growth(what) for what in found]


def in_postgres(
    database_url: str,
    services: Collection[str],
    *,
    num_own: int,
    lease_s: float,
    quiet_s: float = QUIET_S,
) -> list[Finding]:
    """Connections and transactions that nobody gave back. `num_own` are the harness's."""
    pools = {
        "gateway": POOL_SIZE,
        "relay": RelaySettings().concurrency + len(LOOPS),
        "stage-0": POOL_SIZE,
    }
    pools["worker"] = POOL_SIZE + 1  # any of them may be a head; one more for its membership
    roles = [
        "worker" if name.startswith("worker-") else name.partition(".")[0] for name in services
    ]
    num_max = num_own + sum(pools[role] + NUM_BELLS for role in roles if role in pools)
    seen = (0, 0)

    def is_quiet() -> bool:
        nonlocal seen
        with psycopg.connect(database_url) as connection:
            seen = connection.execute(CONNECTIONS, (lease_s,)).fetchall()[0]
        return seen[0] <= num_max and seen[1] == 0

    if within(quiet_s, is_quiet):
        return []
    return [
        _growth(
            f"Postgres has {seen[0]} connections, of {num_max},"
            f" and {seen[1]} transactions older than a lease"
        )
    ]


def _long(database_url: str, client: redis.Redis, streams: Collection[str]) -> Iterator[str]:
    with psycopg.connect(database_url) as connection:
        fences = {
            keys.job_stream(job_id): int(fence) for job_id, fence in connection.execute(FENCES)
        }
    for key in streams:
        num = client.xlen(key)
        num_max = fences.get(key, 0) * ENTRIES_PER_ATTEMPT
        if num > num_max:
            yield f"{key} has {num} entries, more than {num_max} for {fences.get(key, 0)} attempts"


def _lasting(client: redis.Redis) -> Iterator[str]:
    lasting = [key for key in client.scan_iter() if client.ttl(key) == -1]
    strange = [key for key in lasting if not LASTING.fullmatch(key)]
    if strange:
        yield f"{len(strange)} keys never expire, such as {strange[0]}"
    sizes = {key: int(client.memory_usage(key, samples=0) or 0) for key in lasting}
    if sum(sizes.values()) > SCRAP_BYTES:
        largest = max(sizes, key=lambda key: sizes[key])
        taken_mib = sum(sizes.values()) / MIB
        yield f"keys that never expire take {taken_mib:.1f} MiB; the largest is {largest}"


def _client(redis_url: str) -> redis.Redis:
    return redis.Redis.from_url(redis_url, decode_responses=True)


def _growth(what: str) -> Finding:
    return Finding(invariant="I6", count="growth", what=what)
