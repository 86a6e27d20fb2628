"""Redis that hangs, forgets, refuses and dies. It is the bell: none of this may cost a job."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import psycopg
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from shardline.client import Client
from tests.chaos.faults.fault import Broken, Fault, Simple, hold
from tests.chaos.load.journal import Asked
from tests.chaos.load.target import Target
from tests.chaos.stack.local_target import LocalTarget

LEASES = (0.5, 1.5, 5.0)
FULL_BYTES = 1 << 20
NUM_RECONNECTS = 20
BETWEEN_S = 0.4
SEATS = 64
INTERACTIVE_SEATS = 8
"""A head's, by default; the latter are besides, for jobs of priority 0 to 3."""
NUM_WAITING = 2 * SEATS
RECONNECTS = "reconnects"
SHORT = (0, 2, 4)
"""Numbers of requests that end soon."""
CLAIMED = """
SELECT count(*) FILTER (WHERE priority > 3), count(*) FROM jobs
WHERE state = 'running' AND lease_until > now() GROUP BY worker
"""
BUSY_ROUNDS = 80_000_000
BUSY_LOOP = (
    "local sum = 0; for round = 1, tonumber(ARGV[1]) do sum = sum + round % 7 end; return sum"
)


@contextmanager
def client(target: Target) -> Iterator[redis.Redis]:
    """Past every proxy; no answer is waited for longer than a fault may last."""
    with redis.Redis.from_url(
        target.redis_url, socket_timeout=60, retry=Retry(NoBackoff(), 0)
    ) as connection:
        yield connection


def cut(target: Target, rng: random.Random) -> None:
    """CLIENT KILL: every connection at once."""
    with client(target) as connection:
        for kind in ("normal", "pubsub"):
            connection.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")


def reconnecting(target: LocalTarget, rng: random.Random) -> None:
    """CLIENT KILL again and again while more jobs wait than a head has seats: none may claim more
    than that, and urgent ones beside them. Those of the last time count: the load must drain in the
    end."""
    num_more = NUM_WAITING - len(target.journal.open(RECONNECTS))
    asked = [
        Asked(id=uuid4(), number=rng.choice(SHORT), door=RECONNECTS, promised=True)
        for _ in range(num_more)
    ]
    for each in asked:
        target.journal.ask(each)
    documents = [
        {**target.workload.dressed(each.number, each.dress), "id": each.id} for each in asked
    ]
    with Client(database_url=target.database_url, redis_url=target.redis_url) as producer:
        producer.submit_many(documents)
    most = most_of_all = 0
    with psycopg.connect(target.database_url, autocommit=True) as connection:
        for _ in range(NUM_RECONNECTS):
            cut(target, rng)
            hold(BETWEEN_S)
            for num_batch, num in connection.execute(CLAIMED):
                most = max(most, num_batch)
                most_of_all = max(most_of_all, num)
    if most > SEATS or most_of_all > SEATS + INTERACTIVE_SEATS:
        held = f"{most} jobs that may wait, and {most_of_all} in all"
        raise Broken(
            f"a head of {SEATS} seats and {INTERACTIVE_SEATS} interactive ones holds {held}"
        )


def no_debug(target: Target) -> str | None:
    """Servers refuse DEBUG unless their configuration allows it."""
    try:
        with client(target) as connection:
            connection.execute_command("DEBUG", "SLEEP", "0")
    except redis.ResponseError as error:
        return f"the server refuses DEBUG: {error}"
    return None


def sleeping(target: Target, rng: random.Random) -> None:
    """DEBUG SLEEP: the server's only thread sleeps."""
    with client(target) as connection:
        connection.execute_command("DEBUG", "SLEEP", str(1.5 * target.times.lease_s))


def busy(target: Target, rng: random.Random) -> None:
    """A script that keeps the server busy."""
    with client(target) as connection:
        connection.eval(BUSY_LOOP, 0, str(BUSY_ROUNDS))


def pausing(leases: float) -> Callable[[LocalTarget, random.Random], None]:
    """SIGSTOP, then SIGCONT."""

    def pause(target: LocalTarget, rng: random.Random) -> None:
        target.redis.pause()
        hold(leases * target.times.lease_s)
        target.redis.resume()

    return pause


def die_empty(target: LocalTarget, rng: random.Random) -> None:
    """SIGKILL; it comes back without anything."""
    target.redis.restart()


def stay_away(target: LocalTarget, rng: random.Random) -> None:
    """SIGKILL; it comes back, empty, only after some leases."""
    target.redis.kill()
    hold(1.5 * target.times.lease_s)
    target.redis.start()


def die_with_data(target: LocalTarget, rng: random.Random) -> None:
    """SIGKILL after a snapshot, which it reads when it comes back: old messages return."""
    with client(target) as connection:
        connection.save()
    target.redis.restart()
    (Path(target.redis.home) / "redis" / "dump.rdb").unlink(missing_ok=True)


def flush(target: Target, rng: random.Random) -> None:
    """FLUSHALL."""
    with client(target) as connection:
        connection.flushall()


def full(target: Target, rng: random.Random) -> None:
    """Maxmemory is reached: writes are refused, reads are answered."""
    with client(target) as connection:
        before_bytes = int(connection.config_get("maxmemory")["maxmemory"] or 0)
        connection.config_set("maxmemory", FULL_BYTES)
        try:
            hold(1.5 * target.times.lease_s)
        finally:
            connection.config_set("maxmemory", before_bytes)


FAULTS: tuple[Fault, ...] = (
    Simple(kind="redis: client kill", inject=cut),
    Simple(kind="redis: 20 reconnects under load", inject=reconnecting),
    Simple(kind="redis: debug sleep", inject=sleeping, why_not=no_debug),
    Simple(kind="redis: busy script", inject=busy),
    *(Simple(kind=f"redis: pause {leases:g} leases", inject=pausing(leases)) for leases in LEASES),
    Simple(kind="redis: kill and come back empty", inject=die_empty, is_kill=True),
    Simple(kind="redis: kill and stay away 1.5 leases", inject=stay_away, is_kill=True),
    Simple(kind="redis: kill and come back with old data", inject=die_with_data, is_kill=True),
    Simple(kind="redis: flushall", inject=flush),
    Simple(kind="redis: maxmemory reached", inject=full),
)
