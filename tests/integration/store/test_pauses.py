"""What a pause holds back and what it does not, on a real Postgres: jobs that wait, are sent, run
or end, and what thousands of paused ones cost the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from shardline.base.errors import Invalid, NotFound
from shardline.contract.ids import new_id
from shardline.contract.job import JobState
from shardline.contract.schedules.schedule_tables import PauseKind
from shardline.store import fleets, jobs
from shardline.store.schedules import pauses
from shardline.store.statistics import demand
from shardline.store.statistics.overview import overview
from shardline.store.statistics.server_state import unsent_models
from shardline_server.store import outbox, paused_jobs, sweeps
from shardline_server.store.windows import LockedRows
from tests.integration.rows import (
    LONG_S,
    MODEL,
    cell,
    change,
    claim,
    database_with_head,
    end,
    release,
    request,
    running,
    state,
    submit,
    success,
)

NUM_PAUSED = 10_000
MOST_READ = 1_000
"""Rows of `jobs` that a turn of the outbox reads beside thousands of paused ones."""

FIELDS: dict[str, dict[str, Any]] = {
    "tenant": {"tenant": "acme"},
    "tag": {"metadata": {"team": "a=b"}},
}
"""Of the jobs that are to be paused, by kind."""

BATCH = """
INSERT INTO batches (id, tenant_id, endpoint, input_file_id, completion_window, status, expires_at,
    num_lines, last_line, next_line, next_byte, first_open, fence)
VALUES (:id, 'default', '/v1/completions', :id, '24h', 'in_progress', now() + interval '1 day',
    1, 1, 2, 0, 1, 0)
"""
LINE = """
INSERT INTO batch_lines (batch_id, line, job_id, num_jobs, num_choices)
VALUES (:id, 1, :job_id, 1, 1)
"""


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    with database_with_head(database_url) as engine:
        yield engine


def pause(engine: Engine, kind: str, target: str) -> None:
    with engine.begin() as connection:
        pauses.pause(connection, PauseKind(kind), target)


def resume(engine: Engine, kind: str, target: str) -> None:
    with engine.begin() as connection:
        pauses.resume(connection, PauseKind(kind), target)


def turn(engine: Engine) -> list[UUID]:
    """One of a relay's, until it has nothing to move; the jobs that it sends."""
    while True:
        with engine.begin() as connection:
            if not paused_jobs.settle(connection):
                break
    with engine.begin() as connection:
        return [send.job_id for send in outbox.stamp_due(connection, resend_s=LONG_S)]


def held(engine: Engine) -> set[UUID]:
    with engine.begin() as connection:
        rows = connection.scalars(text("SELECT id FROM jobs WHERE paused_by IS NOT NULL"))
        return set(rows)


def tenants(engine: Engine, *names: str) -> None:
    for name in names:
        change(engine, "INSERT INTO tenants (id) VALUES (:name)", name=name)


def of_a_batch(engine: Engine) -> tuple[str, UUID]:
    """A batch's name, and the job of its line."""
    (job_id,) = submit(engine)
    batch_id = new_id()
    change(engine, BATCH, id=batch_id)
    change(engine, LINE, id=batch_id, job_id=job_id)
    return f"batch_{batch_id}", job_id


@pytest.mark.parametrize("kind", list(PauseKind))
def test_a_paused_job_waits_and_runs_once_resumed_and_others_go_on(
    engine: Engine, kind: str
) -> None:
    tenants(engine, "acme")
    batch, line = of_a_batch(engine)
    target = {"model": MODEL, "tenant": "acme", "batch": batch, "tag": "team=a=b"}[kind]
    paused = {line} if kind == "batch" else {*submit(engine, 3, **FIELDS.get(kind, {}))}
    others = {*submit(engine, 2)} | ({line} - paused)
    if kind == "model":
        paused, others = paused | others, set()

    pause(engine, kind, target)
    assert {*turn(engine)} == others
    assert held(engine) == paused
    assert claim(engine, [*paused]) == [], "a message of before changes nothing"
    assert turn(engine) == []

    resume(engine, kind, target)
    assert {*turn(engine)} == paused
    assert held(engine) == set()
    assert {one.job_id for one in claim(engine, [*paused, *others])} == paused | others


def test_what_is_sent_is_not_claimed_and_what_runs_goes_on(engine: Engine) -> None:
    claimed = running(engine)
    (sent,) = submit(engine)
    assert turn(engine) == [sent]
    pause(engine, "model", MODEL)
    assert claim(engine, [sent]) == []
    assert turn(engine) == []
    assert held(engine) == {sent}, "it takes no place in the window"
    assert end(engine, success(claimed)) == {claimed.job_id: JobState.SUCCEEDED}
    resume(engine, "model", MODEL)
    assert turn(engine) == [sent]


def test_a_job_that_its_head_gave_back_waits_like_the_others(engine: Engine) -> None:
    claimed = running(engine)
    pause(engine, "model", MODEL)
    assert release(engine, claimed)
    assert turn(engine) == []
    assert held(engine) == {claimed.job_id}


def test_deadlines_and_cancels_end_paused_jobs(engine: Engine) -> None:
    late, cancelled = submit(engine, 2, deadline_s=60.0)
    pause(engine, "model", MODEL)
    turn(engine)
    change(engine, "UPDATE jobs SET deadline_at = now() WHERE id = :id", id=late)
    with engine.begin() as connection:
        sweeps.sweep_stopped_queued(connection, lambda *_: "")
        jobs.request_cancel(connection, [cancelled])
    assert (state(engine, late), state(engine, cancelled)) == ("expired", "cancelled")


def test_a_job_under_two_pauses_waits_for_both(engine: Engine) -> None:
    (job_id,) = submit(engine)
    pause(engine, "model", MODEL)
    turn(engine)
    pause(engine, "tenant", "default")
    resume(engine, "model", MODEL)
    assert turn(engine) == []
    resume(engine, "tenant", "default")
    assert turn(engine) == [job_id]


def test_rows_of_sql_pause_and_resume(engine: Engine) -> None:
    (job_id,) = submit(engine)
    change(engine, "INSERT INTO pauses (kind, target) VALUES ('model', 'm')")
    assert turn(engine) == []
    change(engine, "DELETE FROM pauses")
    assert turn(engine) == [job_id]


def test_a_paused_job_is_no_fault_and_asks_for_no_worker(engine: Engine) -> None:
    submit(engine, 3)
    change(engine, "UPDATE jobs SET created_at = created_at - interval '1 hour'")
    change(engine, "UPDATE jobs SET not_before = created_at")
    pause(engine, "model", MODEL)
    turn(engine)
    with engine.begin() as connection:
        assert unsent_models(connection, late_s=30.0) == []
        assert demand.oldest_queued(connection) == {MODEL: 0.0}
        assert demand.demand(connection, MODEL, window_s=60.0).num_queued == 0
        assert sweeps.count_active(connection) == {(MODEL, "paused"): 3}
        assert fleets.wanted(connection, [MODEL]) == set()
        (load,) = overview(connection).models
        assert (load.jobs.num_queued, load.jobs.num_paused) == (0, 3)


@pytest.mark.parametrize("is_analyzed", [False, True])
@pytest.mark.parametrize("kind", ["tenant", "tag"])
def test_thousands_of_paused_jobs_cost_the_others_nothing(
    engine: Engine, kind: str, is_analyzed: bool
) -> None:
    tenants(engine, "acme")
    many = [request(tenant="acme", metadata={"team": "a"})] * NUM_PAUSED
    with engine.begin() as connection:
        jobs.insert_jobs(connection, many, prepared=[((5, 6), 8)] * NUM_PAUSED)
    pause(engine, kind, "acme" if kind == "tenant" else "team=a")
    assert turn(engine) == []
    assert len(held(engine)) == NUM_PAUSED
    ids = submit(engine, 20, tenant="acme" if kind == "tag" else "default")
    if is_analyzed:
        change(engine, "ANALYZE jobs")
    for statement, values in (
        (paused_jobs.RELEASE, {}),
        (paused_jobs.SET_ASIDE, LockedRows().parameters()),
        (outbox.STAMP, {"resend_s": LONG_S, **LockedRows().parameters()}),
    ):
        assert num_read(engine, statement.text, values) < MOST_READ
    assert turn(engine) == ids


def num_read(engine: Engine, statement: str, values: dict[str, Any]) -> int:
    """Rows of `jobs` that a statement reads, also in vain; what it writes is undone."""
    with engine.connect() as connection:
        explain = text(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}")
        (plan,) = connection.execute(explain, values).scalar_one()
        connection.rollback()
    return sum(_read(node) for node in _nodes(plan["Plan"]))


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for inner in plan.get("Plans", ()):
        yield from _nodes(inner)


def _read(node: dict[str, Any]) -> int:
    if node.get("Relation Name") != "jobs" or "Scan" not in node["Node Type"]:
        return 0
    wasted = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
    return int((node["Actual Rows"] + wasted) * node["Actual Loops"])


def test_pauses_are_checked_and_listed(engine: Engine) -> None:
    for kind, target in (("tag", "team"), ("tag", "=a"), ("batch", "x"), ("model", "")):
        with pytest.raises(Invalid):
            pause(engine, kind, target)
    with pytest.raises(NotFound):
        resume(engine, "model", "other")
    with engine.begin() as connection:
        for reason in ("first", "second"):
            pauses.pause(connection, PauseKind.TENANT, "acme", reason=reason)
        (listed,) = pauses.list_pauses(connection)
    assert (listed.kind, listed.target, listed.reason) == ("tenant", "acme", "second")
    assert cell(engine, "SELECT count(*) FROM pauses") == 1
