"""A Postgres that stalls without an error: heads and relays wake together, and nobody's job is
taken for dead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text

from services.standalone.servers import Postgres
from shardline.base.config import Times
from shardline.contract.job import JobState
from shardline_server.store.leases import Beat, heartbeat
from tests.chaos.network.proxy import Direction, Proxy
from tests.integration.relay.relay_stack import TIME_SCALE, RelayStack, relay_stack
from tests.integration.rows import cell, change, running, state, submit
from tests.polling import until

LEASE_S = Times().scaled(TIME_SCALE).lease_s


@pytest.fixture
def here(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[RelayStack]:
    """Servers without a relay."""
    with relay_stack(database_url, redis_url, tmp_path) as here:
        yield here


@pytest.fixture
def proxy(postgres_server: Postgres) -> Iterator[Proxy]:
    """Between relays and Postgres."""
    (socket,) = [
        path for path in postgres_server.sockets.glob(".s.PGSQL.*") if path.suffix != ".lock"
    ]
    proxy = Proxy(str(socket))
    proxy.start()
    yield proxy
    proxy.stop()


def wait_for_a_sweep(here: RelayStack) -> None:
    """Until a sweep that began after this call is over: the first row may be found by one under
    way."""
    for _ in range(2):
        (job_id,) = submit(here.engine)
        change(here.engine, "UPDATE jobs SET deadline_at = now() WHERE id = :id", id=job_id)
        here.wait_for_end(job_id)


def test_heads_may_beat_before_a_rescue_after_a_stall_of_postgres(
    here: RelayStack, proxy: Proxy
) -> None:
    database = here.engine.url.database
    relayed = replace(
        here, database_url=f"postgresql://shardline@{proxy.host}:{proxy.port}/{database}"
    )
    relayed.start_relay()
    wait_for_a_sweep(here)
    living, dead = (running(here.engine, lease_s=LEASE_S) for _ in range(2))

    for direction in Direction:
        proxy.drop(direction)
    until(
        lambda: cell(
            here.engine, "SELECT bool_and(lease_until < now()) FROM jobs WHERE state = 'running'"
        )
    )
    proxy.clear()
    wait_for_a_sweep(here)

    with here.engine.begin() as connection:
        beat = Beat(job_id=living.job_id, fence=living.fence, start=0)
        assert heartbeat(connection, [beat], lease_s=60)
    # The head that never comes back is noticed as ever, a lease later.
    here.wait_for(dead.job_id, lambda job: job.state is JobState.QUEUED)
    assert state(here.engine, living.job_id) is JobState.RUNNING
    assert cell(here.engine, "SELECT crashes FROM jobs WHERE id = :id", id=living.job_id) == 0


@pytest.mark.parametrize(
    ("table", "mode"),
    [
        ("pipelines", "ACCESS EXCLUSIVE"),
        ("results", "ACCESS EXCLUSIVE"),
        # VACUUM FULL, then CREATE INDEX.
        ("attempts", "ACCESS EXCLUSIVE"),
        ("jobs", "SHARE"),
    ],
)
def test_a_table_that_heads_wait_for_is_a_stall_too(
    here: RelayStack, table: str, mode: str
) -> None:
    here.start_relay()
    wait_for_a_sweep(here)

    # So long that the lock lasts for a stall, however late it is had.
    living = running(here.engine, lease_s=2 * LEASE_S)
    expired = "SELECT lease_until < now() FROM jobs WHERE id = :id"
    with here.engine.begin() as connection:
        connection.execute(text(f"LOCK TABLE {table} IN {mode} MODE"))
        until(lambda: cell(here.engine, expired, id=living.job_id))
    wait_for_a_sweep(here)

    with here.engine.begin() as connection:
        beat = Beat(job_id=living.job_id, fence=living.fence, start=0)
        assert heartbeat(connection, [beat], lease_s=60)
    assert cell(here.engine, "SELECT crashes FROM jobs WHERE id = :id", id=living.job_id) == 0
