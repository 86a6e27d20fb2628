"""Rules that the database itself keeps, whatever a client says: one result a job, and its own clock
for leases."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import IntegrityError

from shardline_server.store import leases
from shardline_server.store.leases import Beat
from tests.integration.rows import LONG_S, cell, change, end, running, success


def test_the_database_refuses_a_second_result(engine: Engine) -> None:
    claimed = running(engine)
    end(engine, success(claimed))

    with pytest.raises(IntegrityError, match="results_pkey"):
        change(
            engine,
            "INSERT INTO results SELECT * FROM results WHERE job_id = :id",
            id=claimed.job_id,
        )


def test_a_lease_follows_the_time_of_postgres_and_not_the_workers_clock(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = time.time
    read_one = time.clock_gettime
    monkeypatch.setattr(time, "time", lambda: read() - 24 * LONG_S)
    monkeypatch.setattr(time, "clock_gettime", lambda clock: read_one(clock) - 24 * LONG_S)

    claimed = running(engine)
    with engine.begin() as connection:
        leases.heartbeat(
            connection, [Beat(job_id=claimed.job_id, fence=claimed.fence, start=0)], lease_s=LONG_S
        )

    left_s = "SELECT extract(epoch FROM lease_until - now())::float8 FROM jobs WHERE id = :id"
    assert LONG_S / 2 < cell(engine, left_s, id=claimed.job_id) <= LONG_S
