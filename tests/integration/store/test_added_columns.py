"""Columns that an operator has added to `jobs`, with names that our statements use for others:
every job lives as without them."""

from __future__ import annotations

import re

import pytest
from sqlalchemy import Engine, text

from shardline.contract.job import JobState
from shardline.store import jobs
from shardline_server.store import (
    crashes,
    leases,
    outbox,
    parents,
    paused_jobs,
    preparation,
    retention,
    sweeps,
)
from shardline_server.store.leases import Beat
from tests.integration.rows import (
    LONG_S,
    cell,
    change,
    claim,
    end,
    pass_time,
    request,
    running,
    state,
    submit,
    success,
)
from tests.repository import REPOSITORY

NAMED = re.compile(
    r"\b(?:AS|as) ([a-z][a-z_]+)\b|\b([a-z][a-z_]+) (?:int|float8|jsonb|text|bigint)[,)]"
)
FOLDERS = ("shared/shardline/store", "shared/shardline_server/store")
OTHERS = "SELECT column_name FROM information_schema.columns WHERE table_schema = 'public'"
OWN = f"{OTHERS} AND table_name = 'jobs'"
AGE = """
UPDATE jobs SET created_at = now() - interval '40 days', finished_at = now() - interval '39 days'
WHERE finished_at IS NOT NULL
"""


@pytest.fixture
def crowded(engine: Engine) -> Engine:
    """Has in `jobs` a column of each name that other tables and our statements use."""
    named = {
        name
        for folder in FOLDERS
        for path in (REPOSITORY / folder).rglob("*.py")
        for found in NAMED.findall(path.read_text())
        for name in found
        if name
    }
    with engine.begin() as connection:
        others = set(connection.scalars(text(OTHERS)))
        own = set(connection.scalars(text(OWN)))
        new = (named | others) - own
        assert {"tokens", "logprobs", "name", "job_id", "wait_s", "ratio"} <= new
        columns = ", ".join(f'ADD COLUMN "{name}" int' for name in sorted(new))
        connection.execute(text(f"ALTER TABLE jobs {columns}"))
    return engine


def test_jobs_run_and_end_beside_any_added_column(crowded: Engine) -> None:
    change(crowded, "INSERT INTO quotas (tenant_id, max_running) VALUES ('default', 8)")
    (job_id,) = submit(crowded)
    with crowded.begin() as connection:
        assert [send.job_id for send in outbox.stamp_due(connection, resend_s=LONG_S)] == [job_id]
        assert paused_jobs.settle(connection) == 0
    (claimed,) = claim(crowded, [job_id])
    with crowded.begin() as connection:
        beat = Beat(job_id=job_id, fence=claimed.fence, start=0, ids=(7,))
        assert leases.heartbeat(connection, [beat], lease_s=LONG_S)
        given_back = crashes.requeue_or_fail_held(connection, [(job_id, claimed.fence)])
    assert given_back == {job_id: "lost"}
    (claimed,) = claim(crowded, [job_id])
    assert claimed.output_ids == (7,)
    assert end(crowded, success(claimed)) == {job_id: JobState.SUCCEEDED}
    change(crowded, AGE)
    with crowded.begin() as connection:
        assert retention.delete_old(connection, age_s=1.0).num_deleted == 1


def test_sweeps_end_and_requeue_beside_any_added_column(crowded: Engine) -> None:
    stopped, lost = running(crowded), running(crowded)
    (waiting,) = submit(crowded)
    with crowded.begin() as connection:
        beat = Beat(job_id=stopped.job_id, fence=stopped.fence, start=0, ids=(7,))
        leases.heartbeat(connection, [beat], lease_s=LONG_S)
        jobs.request_cancel(connection, [stopped.job_id])
        pass_time(connection, waiting, "deadline_at")
        for claimed in (stopped, lost):
            pass_time(connection, claimed.job_id, "lease_until")
    with crowded.begin() as connection:
        sweeps.sweep_stopped_queued(connection, lambda *_: "")
        swept = sweeps.sweep_expired_leases(connection, lambda *_: "one", lease_s=0)
    assert swept == {stopped.job_id: "cancelled", lost.job_id: "crashed"}
    assert state(crowded, waiting) is JobState.EXPIRED
    assert cell(crowded, "SELECT results.text FROM results") == "one"


def test_requests_are_repeated_and_prepared_beside_any_added_column(crowded: Engine) -> None:
    wanted = request(idempotency_key="once")
    with crowded.begin() as connection:
        first, again = (jobs.insert_jobs(connection, [wanted])[0] for _ in range(2))
        (row,) = preparation.take_unprepared(connection, lease_s=LONG_S)
        assert not parents.release(connection)
    assert (again.job_id, again.is_new) == (first.job_id, False)
    assert row.id == first.job_id
