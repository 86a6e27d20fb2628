"""Postgres that hangs, dies, refuses and cuts connections. What it has committed stays: it is the
truth."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import psutil
import psycopg

from tests.chaos.faults.fault import Fault, NotInjected, Simple, hold
from tests.chaos.load.target import Target
from tests.chaos.network.proxy import Direction
from tests.chaos.stack.local_target import LocalTarget

LEASES = (0.5, 1.5, 5.0)
MAX_CONNECTIONS = 250
ANSWERS_LOST_S = (0.05, 0.5)
BACKENDS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE pid <> pg_backend_pid() AND datname IS NOT NULL"
)

CANCEL_SOME = """
UPDATE jobs SET cancel_requested_at = now() WHERE id IN (
    SELECT id FROM jobs WHERE state IN ('queued', 'running')
    ORDER BY state DESC LIMIT 8 FOR UPDATE SKIP LOCKED)
"""


@contextmanager
def session(target: Target) -> Iterator[psycopg.Connection[Any]]:
    """Past every proxy, outside of any transaction."""
    with closing(
        psycopg.connect(target.database_url, autocommit=True, connect_timeout=30)
    ) as connection:
        yield connection


def cut(target: Target, rng: random.Random) -> None:
    """pg_terminate_backend of every session."""
    with session(target) as connection:
        connection.execute(BACKENDS)


def stop_at_once(target: LocalTarget, rng: random.Random) -> None:
    """An immediate stop (SIGQUIT), then a start that recovers from the log."""
    target.postgres.stop_signal = signal.SIGQUIT
    target.postgres.stop()
    target.postgres.stop_signal = signal.SIGINT
    target.postgres.start()


def die(target: LocalTarget, rng: random.Random) -> None:
    """SIGKILL to the postmaster, then a start."""
    target.postgres.restart()


def stay_away(target: LocalTarget, rng: random.Random) -> None:
    """SIGKILL, and a start only after more than a lease: heads must stop by themselves."""
    target.postgres.kill()
    hold(1.5 * target.times.lease_s)
    target.postgres.start()


def lose_a_backend(target: LocalTarget, rng: random.Random) -> None:
    """SIGKILL to one backend: Postgres throws out everybody and recovers."""
    clients = [
        each for each in psutil.Process(target.postgres.pid).children() if _serves_a_client(each)
    ]
    if not clients:
        raise NotInjected("no backend serves a client")
    rng.choice(sorted(clients, key=lambda each: each.pid)).kill()
    # Until the postmaster has thrown the others out it still answers.
    hold(0.5)
    _wait_until_it_answers(target)


def pausing(leases: float) -> Callable[[LocalTarget, random.Random], None]:
    """As `frozen`, for a multiple of the lease."""

    def pause(target: LocalTarget, rng: random.Random) -> None:
        with frozen(target):
            hold(leases * target.times.lease_s)

    return pause


@contextmanager
def frozen(target: LocalTarget) -> Iterator[None]:
    """The server and all its backends."""
    target.postgres.pause()
    backends = psutil.Process(target.postgres.pid).children()
    for backend in backends:
        _signal(backend, signal.SIGSTOP)
    try:
        yield
    finally:
        for backend in backends:
            _signal(backend, signal.SIGCONT)
        target.postgres.resume()


def exhaust(target: Target, rng: random.Random) -> None:
    """Strangers take every connection that is left; the stack's own are cut, so that it needs new
    ones."""
    with ExitStack() as opened:
        with session(target) as connection:
            for _ in range(MAX_CONNECTIONS):
                try:
                    opened.enter_context(
                        closing(psycopg.connect(target.database_url, application_name="stranger"))
                    )
                except psycopg.OperationalError:
                    break
            else:
                raise NotInjected(f"it takes more than {MAX_CONNECTIONS} connections")
            connection.execute(
                BACKENDS + " AND application_name LIKE 'shardline%' AND random() < 0.5"
            )
        hold(1.5 * target.times.lease_s)


def lose_answers(target: LocalTarget, rng: random.Random) -> None:
    """What is sent arrives, and connections break before any answer comes back: was a COMMIT done?
    Nobody knows."""
    try:
        target.database_proxy.drop(Direction.TO_CLIENT)
        hold(rng.uniform(*ANSWERS_LOST_S))
        target.database_proxy.cut()
    finally:
        target.database_proxy.clear()


def read_only(target: Target, rng: random.Random) -> None:
    """default_transaction_read_only, as after a failover to a replica."""
    with session(target) as connection:
        connection.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        connection.execute("SELECT pg_reload_conf()")
        hold(1.5 * target.times.lease_s)
        connection.execute("SET default_transaction_read_only = off")
        connection.execute("ALTER SYSTEM RESET default_transaction_read_only")
        connection.execute("SELECT pg_reload_conf()")


def lock(target: Target, rng: random.Random) -> None:
    """A stranger holds a table, as a careless migration does."""
    table = rng.choice(("jobs", "attempts", "results", "pipelines"))
    with session(target) as connection, connection.transaction():
        connection.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        hold(1.5 * target.times.lease_s)


def lock_rows(target: Target, rng: random.Random) -> None:
    """A tenant's transaction changes some of its jobs and stays open for longer than a lease; then
    it takes that back."""
    with session(target) as connection, connection.transaction(force_rollback=True):
        if not connection.execute(CANCEL_SOME).rowcount:
            raise NotInjected("no job is open")
        hold(2.5 * target.times.lease_s)


def _serves_a_client(backend: psutil.Process) -> bool:
    """Its title names the user and the database."""
    try:
        return "shardline shardline" in " ".join(backend.cmdline())
    except psutil.Error:
        return False


def _wait_until_it_answers(target: Target) -> None:
    for _ in range(100):
        try:
            with session(target):
                return
        except psycopg.OperationalError:
            hold(0.1)
    raise NotInjected("Postgres does not answer again")


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


FAULTS: tuple[Fault, ...] = (
    Simple(kind="postgres: terminate backends", inject=cut),
    Simple(kind="postgres: immediate stop", inject=stop_at_once, is_kill=True),
    Simple(kind="postgres: kill", inject=die, is_kill=True),
    Simple(kind="postgres: kill and stay away 1.5 leases", inject=stay_away, is_kill=True),
    Simple(kind="postgres: kill a backend", inject=lose_a_backend, is_kill=True),
    *(
        Simple(kind=f"postgres: pause {leases:g} leases", inject=pausing(leases))
        for leases in LEASES
    ),
    Simple(kind="postgres: connections exhausted", inject=exhaust),
    Simple(kind="postgres: COMMITs with unknown outcome", inject=lose_answers),
    Simple(kind="postgres: read only", inject=read_only),
    Simple(kind="postgres: table locked", inject=lock),
    Simple(kind="postgres: rows of jobs locked 2.5 leases", inject=lock_rows),
)
