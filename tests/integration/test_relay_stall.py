"""A Postgres that stalls without an error: heads and relays wake together, and nobody's job is taken for dead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.standalone.servers import Postgres
from shardline.config import Times
from shardline.job import JobState
from shardline.store.leases import Beat, heartbeat
from tests.faults.proxy import Direction, Proxy
from tests.integration.relay_world import TIME_SCALE, RelayWorld, eventually, relay_world
from tests.integration.store_world import cell, change, running, state, submit

LEASE_S = Times().scaled(TIME_SCALE).lease_s


@pytest.fixture
def here(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[RelayWorld]:
    """A world without a relay."""
    with relay_world(database_url, redis_url, tmp_path) as here:
        yield here


@pytest.fixture
def proxy(postgres_server: Postgres) -> Iterator[Proxy]:
    """Between relays and Postgres."""
    (socket,) = [path for path in postgres_server.sockets.glob(".s.PGSQL.*") if path.suffix != ".lock"]
    proxy = Proxy(str(socket))
    proxy.start()
    yield proxy
    proxy.stop()


def wait_for_a_sweep(here: RelayWorld) -> None:
    """Until a sweep that began after this call is over: the first row may be found by one under way."""
    for _ in range(2):
        (job_id,) = submit(here.engine)
        change(here.engine, "UPDATE jobs SET deadline_at = now() WHERE id = :id", id=job_id)
        here.wait_for_end(job_id)


def test_given_a_postgres_that_stalls_for_a_lease_when_it_answers_then_heads_may_beat_before_any_rescue(
    here: RelayWorld, proxy: Proxy
) -> None:
    database = here.engine.url.database
    relayed = replace(here, database_url=f"postgresql://shardline@{proxy.host}:{proxy.port}/{database}")
    relayed.start_relay()
    wait_for_a_sweep(here)
    living, dead = (running(here.engine, lease_s=LEASE_S) for _ in range(2))

    for direction in Direction:
        proxy.drop(direction)
    eventually(lambda: cell(here.engine, "SELECT bool_and(lease_until < now()) FROM jobs WHERE state = 'running'"))
    proxy.clear()
    wait_for_a_sweep(here)

    with here.engine.begin() as connection:
        beat = Beat(job_id=living.job_id, fence=living.fence, start=0)
        assert heartbeat(connection, [beat], lease_s=60)
    # The head that never comes back is noticed as ever, a lease later.
    here.wait_for(dead.job_id, lambda job: job.state is JobState.QUEUED)
    assert state(here.engine, living.job_id) is JobState.RUNNING
    assert cell(here.engine, "SELECT crashes FROM jobs WHERE id = :id", id=living.job_id) == 0
