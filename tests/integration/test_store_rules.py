"""Rules that the database itself keeps, whatever a client says: one result a job, and its own clock for leases."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import IntegrityError

from shardline.store import leases
from shardline.store.leases import Beat
from tests.integration.store_world import LONG_S, cell, change, end, running, success, world


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    with world(database_url) as engine:
        yield engine


def test_given_a_result_when_a_second_one_is_inserted_then_the_database_refuses_it(engine: Engine) -> None:
    claimed = running(engine)
    end(engine, success(claimed))

    with pytest.raises(IntegrityError, match="results_pkey"):
        change(engine, "INSERT INTO results SELECT * FROM results WHERE job_id = :id", id=claimed.job_id)


def test_given_a_worker_whose_clock_is_wrong_when_it_beats_then_its_lease_is_by_postgres_time(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() - 24 * LONG_S)

    claimed = running(engine)
    with engine.begin() as connection:
        leases.heartbeat(connection, [Beat(job_id=claimed.job_id, fence=claimed.fence, start=0)], lease_s=LONG_S)

    left_s = "SELECT extract(epoch FROM lease_until - now())::float8 FROM jobs WHERE id = :id"
    assert LONG_S / 2 < cell(engine, left_s, id=claimed.job_id) <= LONG_S
