"""An operator's transaction has inserted rows that refer to jobs, and stays open: heads and relays
do their work on these jobs."""

from __future__ import annotations

from sqlalchemy import Engine, text

from shardline.contract.job import JobState
from shardline_server.store import leases, outbox, preparation, sweeps
from shardline_server.store.leases import Beat
from shardline_server.store.preparation import PreparedJob
from tests.integration.rows import (
    LONG_S,
    MODEL,
    change,
    claim,
    end,
    pass_time,
    release,
    running,
    submit,
    success,
)


def test_a_job_that_an_open_transaction_refers_to_runs_and_ends(engine: Engine) -> None:
    change(engine, "CREATE TABLE orders (job_id uuid REFERENCES jobs)")
    (job_id,) = submit(engine)
    expired = running(engine)
    with engine.begin() as connection:
        pass_time(connection, expired.job_id, "lease_until")
    with engine.connect() as other, other.begin():
        other.execute(text("INSERT INTO orders SELECT id FROM jobs"))
        with engine.begin() as connection:
            (sent,) = outbox.stamp_due(connection, resend_s=LONG_S)
        (claimed,) = claim(engine, [job_id])
        key = (job_id, claimed.fence)
        with engine.begin() as connection:
            beat = Beat(job_id=job_id, fence=claimed.fence, start=0, ids=(7,))
            assert leases.heartbeat(connection, [beat], lease_s=LONG_S)[key].renewed
            swept = sweeps.sweep_expired_leases(connection, lambda *_: "", lease_s=0)
        assert release(engine, claimed)
        (again,) = claim(engine, [job_id])
        assert end(engine, success(again)) == {job_id: JobState.SUCCEEDED}
    assert sent.job_id == job_id
    assert swept == {expired.job_id: "crashed"}


def test_a_row_that_an_open_transaction_refers_to_is_prepared(engine: Engine) -> None:
    change(engine, "CREATE TABLE orders (job_id uuid REFERENCES jobs)")
    change(engine, "INSERT INTO jobs (model, prompt) VALUES (:model, 'text')", model=MODEL)
    with engine.connect() as other, other.begin():
        other.execute(text("INSERT INTO orders SELECT id FROM jobs"))
        with engine.begin() as connection:
            (row,) = preparation.take_unprepared(connection, lease_s=LONG_S)
            ready = PreparedJob(id=row.id, model=MODEL, prompt_ids=(5, 6), max_tokens=8, seed=None)
            assert preparation.mark_if_unprepared(connection, [ready]) == 1
