"""A head that lives and computes, and does not renew its leases: it must write, schedule and emit
nothing once they are over. With a second head on the queue, the jobs run there meanwhile."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import psycopg
from psycopg import sql

from services.standalone.processes import wait_until_gone
from shardline_server.failpoints import Point
from tests.chaos.faults.arming import arm
from tests.chaos.faults.fault import Fault, NotInjected, Simple, hold
from tests.chaos.faults.postgres_faults import session
from tests.chaos.network.proxy import Direction
from tests.chaos.stack.local_target import LocalTarget

HANGS_LEASES = 1.4
"""Long enough for another head to claim, too short for it to end what it claimed."""
CUT_OFF_LEASES = 4.0
MARGIN_S = 15.0
SINCE_VERSION = 170_000
"""Postgres lets triggers refuse a login."""

HOLDERS = "SELECT DISTINCT worker FROM jobs WHERE state = 'running' ORDER BY worker"
REFUSE = """
CREATE SCHEMA IF NOT EXISTS faults;
CREATE OR REPLACE FUNCTION faults.refuse() RETURNS event_trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('application_name') = obj_description('faults'::regnamespace) THEN
        RAISE EXCEPTION 'this head is cut off';
    END IF;
END $$;
DROP EVENT TRIGGER IF EXISTS faults_refuse;
CREATE EVENT TRIGGER faults_refuse ON login EXECUTE FUNCTION faults.refuse();
"""
ADMIT = "DROP EVENT TRIGGER faults_refuse"
BACKENDS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s"


def lease_manager_hangs(target: LocalTarget, rng: random.Random) -> None:
    """The thread that speaks to Postgres stands still just after a heartbeat; the engine does not
    know."""
    pause_s = HANGS_LEASES * target.times.lease_s
    arm(target.failpoints, Point.HEARTBEAT_AFTER_COMMIT, "pause", pause_s=pause_s).wait()
    hold(pause_s)


def drains_late(target: LocalTarget, rng: random.Random) -> None:
    """The same while it is told to stop, until it is to give its jobs back."""
    pause_s = target.times.drain_s + target.times.lease_s
    arming = arm(target.failpoints, Point.HEARTBEAT_AFTER_COMMIT, "pause", pause_s=pause_s)
    arming.wait()
    (pid,) = arming.pids
    process = psutil.Process(pid)
    process.terminate()
    if not wait_until_gone(process, timeout_s=pause_s + MARGIN_S):
        process.kill()
        raise NotInjected(f"the head did not end within {pause_s + MARGIN_S:.0f} s after SIGTERM")


def dies_unsure(target: LocalTarget, rng: random.Random) -> None:
    """A heartbeat is committed, and the answer lost. The head says it again, and dies of that: its
    successor goes on from what Postgres holds."""
    proxy = target.database_proxy
    pause_s = target.times.heartbeat_s
    arm(target.failpoints, Point.HEARTBEAT_BEFORE_COMMIT, "pause", pause_s=pause_s).wait()
    try:
        proxy.drop(Direction.TO_CLIENT)
        hold(2 * pause_s)
        again = arm(target.failpoints, Point.HEARTBEAT_AFTER_COMMIT, "kill")
        proxy.cut()
    finally:
        proxy.clear()
    again.wait()


def cut_off(target: LocalTarget, rng: random.Random) -> None:
    """Postgres refuses one head for some leases; everybody else goes on."""
    with session(target) as connection:
        holders = [row[0] for row in connection.execute(HOLDERS)]
        if not holders:
            raise NotInjected("no head holds a job")
        with refused(connection, f"shardline {rng.choice(holders)}"):
            hold(CUT_OFF_LEASES * target.times.lease_s)


@contextmanager
def refused(connection: psycopg.Connection[Any], name: str) -> Iterator[None]:
    """Sessions of this application name end, and no new one is let in."""
    connection.execute(REFUSE)
    try:
        connection.execute(sql.SQL("COMMENT ON SCHEMA faults IS {}").format(name))
        connection.execute(BACKENDS, (name,))
        yield
    finally:
        connection.execute(ADMIT)


def too_old(target: LocalTarget) -> str | None:
    """For what the server cannot do."""
    with session(target) as connection:
        version = connection.info.server_version
    return (
        None
        if version >= SINCE_VERSION
        else f"Postgres {version // 10_000} has no triggers on login"
    )


FAULTS: tuple[Fault, ...] = (
    Simple(kind="lease: a lease manager hangs 1.4 leases", inject=lease_manager_hangs),
    Simple(kind="lease: a lease manager hangs while its head drains", inject=drains_late),
    Simple(kind="lease: a head dies unsure of its heartbeats", inject=dies_unsure, is_kill=True),
    Simple(kind="lease: a head is cut off from Postgres 4 leases", inject=cut_off, why_not=too_old),
)
