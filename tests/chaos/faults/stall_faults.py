"""A Postgres that does not answer and does not fail either: a frozen machine, a disk that hangs, a
silent network.

Whoever holds a job meanwhile is not to blame: heads get the time to beat, and nothing counts as a
crash.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing

import psycopg

from tests.chaos.faults.fault import Broken, Fault, NotInjected, Simple, hold
from tests.chaos.faults.postgres_faults import frozen, session
from tests.chaos.network.proxy import Direction
from tests.chaos.stack.local_target import LocalTarget
from tests.polling import within

STALL_S = (5.0, 40.0)
"""Whatever the time scale: the limits of pools and sockets have none."""
QUIET_S = 20.0

HELD = """
SELECT id, fence FROM jobs WHERE state = 'running'
    AND worker IN (SELECT head FROM pipelines WHERE lease_until > now() AND ready_at IS NOT NULL)
"""
UNRENEWED = "SELECT count(*) FROM jobs WHERE state = 'running' AND lease_until < %s"
"""Leases that are no newer than a moment: overdue, or of a head that died just before it and may be
back already."""
BLAMED = """
SELECT attempts.job_id FROM attempts JOIN unnest(%s::uuid[], %s::bigint[]) AS held(id, fence)
    ON attempts.job_id = held.id AND attempts.fence = held.fence WHERE outcome = 'crashed'
"""

Stall = Callable[[LocalTarget, float], None]


def freeze(target: LocalTarget, stall_s: float) -> None:
    """SIGSTOP to the server and all its backends, then SIGCONT."""
    with frozen(target):
        hold(stall_s)


def hush(target: LocalTarget, stall_s: float) -> None:
    """Connections stay and new ones are taken; what is sent waits on its way, in both
    directions."""
    try:
        for direction in Direction:
            target.database_proxy.drop(direction)
        hold(stall_s)
    finally:
        target.database_proxy.clear()


def stalling(stall: Stall) -> Callable[[LocalTarget, random.Random], None]:
    """For 5 to 40 s. What living heads held before it must not be counted as crashes after it."""

    def inject(target: LocalTarget, rng: random.Random) -> None:
        with session(target) as connection:
            row = connection.execute(
                "SELECT now() + make_interval(secs => %s)", (target.times.lease_s,)
            ).fetchone()
            if not within(QUIET_S, lambda: connection.execute(UNRENEWED, row).fetchone() == (0,)):
                raise NotInjected("leases of the fault before have not been swept")
            held = connection.execute(HELD).fetchall()
        stall(target, rng.uniform(*STALL_S))
        # So long the rescue waits after an outage, and then it looks.
        hold(target.times.lease_s + 2 * target.times.poll_s)
        with closing(psycopg.connect(target.database_url)) as connection:
            ids = [row[0] for row in held]
            fences = [row[1] for row in held]
            blamed = connection.execute(BLAMED, (ids, fences)).fetchall()
        if blamed:
            raise Broken(
                f"{len(blamed)} of {len(held)} jobs of living heads were counted as crashes:"
                f" {blamed[:3]}"
            )

    return inject


FAULTS: tuple[Fault, ...] = (
    Simple(kind="stall: postgres frozen 5 to 40 s", inject=stalling(freeze)),
    Simple(kind="stall: postgres silent 5 to 40 s", inject=stalling(hush)),
)
