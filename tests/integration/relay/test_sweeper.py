"""The sweeper's figures on a real Postgres: every row that it moved is counted, whatever fails
after it."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from services.relay import sweeper as sweeper_module
from services.relay.canceller import MAX_BATCH, Canceller
from services.relay.celery.celery_results import CeleryResults
from services.relay.loop import LoopContext
from services.relay.statistics.job_counts import JobCounts
from services.relay.sweeper import Sweeper
from shardline.base.config import Times
from shardline.contract.job import JobState
from shardline.store import fleets, jobs, models
from shardline.store.connection.database import connect
from shardline.store.fleets import WorkerOffer
from shardline.store.statistics.demand import oldest_queued
from shardline_server.metrics import RelayMetrics
from shardline_server.store import leases, sweeps
from shardline_server.store.leases import Beat
from shardline_server.tokenize import Tokens
from tests.integration.relay.relay_stack import words_tokenizer
from tests.integration.rows import (
    LONG_S,
    MODEL,
    cell,
    change,
    model_row,
    pass_time,
    running,
    submit,
)

TIMES = Times().scaled(0.001)
"""The server is up for longer than such a lease."""


@pytest.fixture
def registry() -> CollectorRegistry:
    """What a scraper reads."""
    return CollectorRegistry()


class Clock:
    """The relay's clock of leases, moved by the test."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def pass_leases(self, num: float) -> None:
        """So many leases go by."""
        self.now_s += num * TIMES.lease_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Instead of the machine's."""
    clock = Clock()
    monkeypatch.setattr(sweeper_module, "lease_clock_s", lambda: clock.now_s)
    return clock


@pytest.fixture
def sweeper(engine: Engine, registry: CollectorRegistry, clock: Clock) -> Sweeper:
    """A relay's, its turns called by the test."""
    metrics = RelayMetrics(registry)
    context = LoopContext(database=engine, times=TIMES, metrics=metrics)
    results = CeleryResults(context, backend_app=None)
    return Sweeper(context, results=results)


def swept(registry: CollectorRegistry, outcome: str) -> float | None:
    """The counter."""
    return registry.get_sample_value("shardline_relay_swept_total", {"outcome": outcome})


def expired(engine: Engine, *, crashes: int = 0) -> None:
    """A job whose head died before its first token."""
    claimed = running(engine)
    change(
        engine,
        "UPDATE jobs SET crashes = :crashes WHERE id = :id",
        crashes=crashes,
        id=claimed.job_id,
    )
    with engine.begin() as connection:
        pass_time(connection, claimed.job_id, "lease_until")


def test_swept_jobs_that_crashed_are_counted_by_what_became_of_them(
    engine: Engine, registry: CollectorRegistry, sweeper: Sweeper
) -> None:
    expired(engine)
    expired(engine, crashes=2)

    sweeper.turn()

    assert (swept(registry, "crashed"), swept(registry, "failed")) == (1, 1)


def test_rows_of_the_first_sweep_are_counted_though_the_second_fails(
    engine: Engine, registry: CollectorRegistry, sweeper: Sweeper
) -> None:
    submit(engine)
    change(engine, "UPDATE jobs SET cancel_requested_at = now()")
    expired(engine)
    change(engine, "ALTER TABLE attempts ADD CONSTRAINT no_crash CHECK (outcome <> 'crashed')")

    with pytest.raises(DBAPIError, match="no_crash"):
        sweeper.turn()

    assert (swept(registry, "cancelled"), swept(registry, "crashed")) == (1, 0)


def test_leases_are_rescued_while_an_end_is_refused(engine: Engine, sweeper: Sweeper) -> None:
    sweeper.turn()
    submit(engine)
    change(engine, "UPDATE jobs SET cancel_requested_at = now()")
    change(engine, "ALTER TABLE jobs ADD CONSTRAINT no_cancel CHECK (state <> 'cancelled')")

    for _ in range(2):
        expired(engine)
        with pytest.raises(DBAPIError, match="no_cancel"):
            sweeper.turn()
        assert num_running(engine) == 0


def num_running(engine: Engine) -> int:
    """Jobs that no sweep has moved."""
    return int(cell(engine, "SELECT count(*) FROM jobs WHERE state = 'running' AND crashes = 0"))


def test_no_lease_expires_for_one_lease_after_half_a_lease_of_silence(
    engine: Engine, sweeper: Sweeper, clock: Clock
) -> None:
    sweeper.turn()
    clock.pass_leases(0.5)
    expired(engine)

    for _ in range(4):
        sweeper.turn()
        assert num_running(engine) == 1
        clock.pass_leases(0.25)
    sweeper.turn()

    assert num_running(engine) == 0


def test_no_lease_expires_when_an_answer_takes_half_a_lease(
    engine: Engine, sweeper: Sweeper, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeper.turn()
    expired(engine)
    fix_now = sweeps.fix_now

    def late(connection: Connection) -> None:
        fix_now(connection)
        clock.pass_leases(0.5)

    monkeypatch.setattr(sweeps, "fix_now", late)
    sweeper.turn()

    assert num_running(engine) == 1


def test_no_lease_expires_after_a_wait_for_a_table_that_took_too_long(
    engine: Engine, database_url: str, registry: CollectorRegistry, clock: Clock
) -> None:
    database = connect(database_url, lock_timeout_s=0.01)
    context = LoopContext(database=database, times=TIMES, metrics=RelayMetrics(registry))
    sweeper = Sweeper(context, results=CeleryResults(context, backend_app=None))
    sweeper.turn()
    expired(engine)

    with engine.begin() as connection:
        connection.execute(text("LOCK TABLE attempts IN SHARE MODE"))
        with pytest.raises(DBAPIError, match="lock timeout"):
            sweeper.turn()
    sweeper.turn()
    assert num_running(engine) == 1

    for _ in range(4):
        clock.pass_leases(0.25)
        sweeper.turn()
    assert num_running(engine) == 0
    database.dispose()


def test_a_stall_between_statements_judges_leases_by_the_first_one(engine: Engine) -> None:
    claimed = running(engine)
    with engine.begin() as connection:
        sweeps.fix_now(connection)
        change(
            engine,
            "UPDATE jobs SET lease_until = clock_timestamp() WHERE id = :id",
            id=claimed.job_id,
        )
        assert sweeps.sweep_expired_leases(connection, lambda *_: "", lease_s=0) == {}


def test_an_expired_lease_is_rescued_at_once_between_normal_turns(
    engine: Engine, sweeper: Sweeper, clock: Clock
) -> None:
    sweeper.turn()
    clock.pass_leases(0.25)
    expired(engine)
    sweeper.turn()
    assert num_running(engine) == 0


def test_a_partial_result_ends_with_no_transaction_open_while_its_tokenizer_loads(
    engine: Engine, sweeper: Sweeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine.begin() as connection:
        models.register_model(connection, {**model_row(MODEL), "tokenizer": words_tokenizer()})
    claimed = running(engine)
    with engine.begin() as connection:
        leases.heartbeat(
            connection,
            [Beat(job_id=claimed.job_id, fence=claimed.fence, start=0, ids=(2, 3))],
            lease_s=LONG_S,
        )
        pass_time(connection, claimed.job_id, "lease_until")
    change(engine, "UPDATE jobs SET cancel_requested_at = now()")
    open_transactions: list[int] = []
    load = Tokens.from_row

    def loading(row: dict[str, object]) -> Tokens:
        query = (
            "SELECT count(*) FROM pg_locks"
            " WHERE locktype = 'transactionid' AND pid <> pg_backend_pid()"
        )
        open_transactions.append(cell(engine, query))
        return load(row)

    monkeypatch.setattr(Tokens, "from_row", loading)
    pauses = [sweeper.turn(), sweeper.turn(), sweeper.turn()]

    assert open_transactions == [0]
    assert pauses == [0.0, 0.0, TIMES.poll_s]
    assert (
        cell(engine, "SELECT state || ': ' || text FROM jobs JOIN results ON job_id = id")
        == "cancelled: one two"
    )


def test_the_gauge_of_ended_jobs_shows_zero_instead_of_vanishing(
    engine: Engine, registry: CollectorRegistry
) -> None:
    counts = JobCounts(LoopContext(database=engine, times=TIMES, metrics=RelayMetrics(registry)))
    submit(engine, 2)

    def queued() -> float | None:
        return registry.get_sample_value("shardline_jobs", {"model": MODEL, "state": "queued"})

    counts.turn()
    assert queued() == 2
    change(engine, "DELETE FROM jobs")
    counts.turn()
    assert queued() == 0


def test_gauges_tell_how_long_jobs_wait_and_what_a_fleet_can_do(
    engine: Engine, registry: CollectorRegistry
) -> None:
    counts = JobCounts(LoopContext(database=engine, times=TIMES, metrics=RelayMetrics(registry)))
    offer = WorkerOffer(shapes={}, profile={})
    with engine.begin() as connection:
        for name in ("one", "other"):
            fleets.join(connection, name, {MODEL: offer}, lease_s=60)
        fleets.store_plan(
            connection, MODEL, version=0, split=[(0, 4)], stages={"one": 0}, tokens_per_s=12.5
        )
    submit(engine, 3)

    def shown(name: str) -> float | None:
        return registry.get_sample_value(name, {"model": MODEL})

    times = "created_at = now() - interval '90 s', not_before = now() - interval '90 s'"
    change(engine, f"UPDATE jobs SET {times}")
    counts.turn()
    waited_s = shown("shardline_oldest_queued_seconds")
    assert waited_s is not None
    assert 90 <= waited_s < 100
    assert (shown("shardline_fleet_workers"), shown("shardline_fleet_tokens_per_s")) == (2, 12.5)
    change(engine, "UPDATE jobs SET not_before = now() + interval '1 h'")
    counts.turn()
    assert shown("shardline_oldest_queued_seconds") == 0, "a delayed job does not wait"


def test_a_job_waits_from_when_it_may_run(engine: Engine) -> None:
    """Not from when it came: at the end of its delay it would be hours old at once, and a fleet
    grow to its maximum."""

    def waited_s() -> float:
        with engine.begin() as connection:
            return oldest_queued(connection)[MODEL]

    delayed, requeued, plain = submit(engine, 3)
    change(
        engine,
        "UPDATE jobs SET created_at = now() - interval '5 h', not_before = now() - interval '10 s'",
    )
    change(
        engine, "UPDATE jobs SET requeued_at = now() - interval '5 s' WHERE id = :id", id=requeued
    )
    assert 10 <= waited_s() < 60
    change(
        engine, "UPDATE jobs SET not_before = now() - interval '90 s' WHERE id = :id", id=requeued
    )
    assert 10 <= waited_s() < 60, "it ran meanwhile"
    times = "created_at = now() - interval '70 s', not_before = now() - interval '70 s'"
    change(engine, f"UPDATE jobs SET {times} WHERE id = :id", id=plain)
    assert 70 <= waited_s() < 120, "one that came later may wait for longer"
    change(engine, "UPDATE jobs SET sent_at = now() WHERE id = :id", id=delayed)
    assert 70 <= waited_s() < 120


def canceller_of(engine: Engine, times: Times = TIMES) -> Canceller:
    """A relay's."""
    metrics = RelayMetrics(CollectorRegistry())
    context = LoopContext(database=engine, times=times, metrics=metrics)
    return Canceller(context, results=CeleryResults(context, backend_app=None))


def test_many_revokes_are_cancelled_in_one_batch_per_transaction(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    canceller = canceller_of(engine)
    sizes = []
    cancel = jobs.request_cancel

    def counted(connection: Connection, ids: list[UUID], **options: Any) -> dict[UUID, JobState]:
        sizes.append(len(ids))
        return cancel(connection, ids, **options)

    monkeypatch.setattr(jobs, "request_cancel", counted)
    canceller.cancel(map(str, submit(engine, 2 * MAX_BATCH + 1)), running=False)

    canceller.turn()

    assert sizes == [MAX_BATCH, MAX_BATCH, 1]
    assert cell(engine, "SELECT count(*) FROM jobs WHERE state = 'cancelled'") == 2 * MAX_BATCH + 1


@pytest.mark.parametrize("runs", [False, True], ids=["queued", "running"])
def test_a_revoke_of_a_locked_row_is_tried_again_and_others_apply_at_once(
    engine: Engine, runs: bool
) -> None:
    url = engine.url.render_as_string(hide_password=False)
    impatient = connect(url, lock_timeout_s=0.001)
    canceller = canceller_of(impatient, Times())
    taken, free = [running(engine).job_id for _ in range(2)] if runs else submit(engine, 2)
    asked = "SELECT array_agg(id) FROM jobs WHERE cancel_requested_at IS NOT NULL"
    with engine.connect() as tenant:
        tenant.execute(text("SELECT FROM jobs WHERE id = :id FOR UPDATE"), {"id": taken})
        canceller.cancel([str(taken), str(free)], running=runs)
        canceller.turn()
        assert cell(engine, asked) == [free]
    canceller.turn()
    impatient.dispose()
    assert set(cell(engine, asked)) == {taken, free}
