"""What nobody deletes is shown and said, on a real Postgres: tables without retention, dead
letters."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import Engine, text
from structlog.testing import capture_logs

from services.relay.loop import LoopContext
from services.relay.relay import Relay
from services.relay.settings import RelaySettings
from services.relay.statistics import growth
from services.relay.statistics.growth import DoublingThreshold, Growth
from shardline.base.config import Times
from shardline_server.metrics import RelayMetrics
from shardline_server.store import leases
from shardline_server.store.claims import ClaimedJob
from shardline_server.store.leases import Beat
from tests.integration.rows import LONG_S, change, claim, running, submit

FILL = """
UPDATE jobs SET state = 'failed', finished_at = now(), error = jsonb_build_object('code', 'crashed',
    'ballast', (SELECT string_agg(md5(n::text), '') FROM generate_series(1, 4000) AS n))
"""
"""Dead letters of 128 KB each."""


UPDATES = (
    "SELECT relname, n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables"
    " WHERE relname IN ('jobs', 'attempts')"
)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def watcher(engine: Engine, registry: CollectorRegistry, *, keeps_all: bool) -> Growth:
    return Growth(
        LoopContext(database=engine, times=Times(), metrics=RelayMetrics(registry)),
        keeps_all=keeps_all,
    )


def warnings(watcher: Growth) -> list[MutableMapping[str, Any]]:
    """Of one look."""
    with capture_logs() as logs:
        watcher.turn()
    return logs


@pytest.mark.parametrize(("keeps_all", "num_warnings"), [(True, 1), (False, 0)])
def test_growing_tables_are_warned_of_unless_retention_is_on(
    engine: Engine,
    registry: CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
    *,
    keeps_all: bool,
    num_warnings: int,
) -> None:
    monkeypatch.setattr(growth, "KEPT_BYTES", 1_000_000)
    watching = watcher(engine, registry, keeps_all=keeps_all)
    assert warnings(watching) == []
    before = registry.get_sample_value("shardline_table_bytes", {"table": "jobs"})

    submit(engine, 20)
    change(engine, FILL)

    said = warnings(watching)
    assert [line["log_level"] for line in said] == ["warning"] * num_warnings
    assert all("SHARDLINE_RETENTION_DAYS" in line["event"] for line in said)
    after = registry.get_sample_value("shardline_table_bytes", {"table": "jobs"})
    assert before is not None
    assert after is not None
    assert after - before > 1_000_000
    assert warnings(watching) == [], "not again until it has doubled"


def test_dead_letters_are_counted_and_warned_of_with_and_without_retention(
    engine: Engine, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "KEPT_DEAD", 3)
    watching = watcher(engine, registry, keeps_all=False)
    submit(engine, 3)
    assert warnings(watching) == []

    change(engine, FILL)

    (said,) = warnings(watching)
    assert (said["log_level"], said["dead_letters"]) == ("warning", 3)
    assert registry.get_sample_value("shardline_dead_letters") == 3


def test_row_versions_kept_by_an_open_transaction_are_shown_and_warned_of(
    engine: Engine, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "DEAD_ROWS", 50)
    watching = watcher(engine, registry, keeps_all=False)
    claimed = running(engine)
    with engine.connect() as dump:
        dump.execution_options(isolation_level="REPEATABLE READ").execute(
            text("SELECT count(*) FROM jobs")
        )
        beat_often(engine, [claimed], num_beats=60)
        (said,) = warnings(watching)

    assert said["dead_rows"] >= 100
    assert "transaction that has been open longest" in said["event"]
    assert (registry.get_sample_value("shardline_dead_rows", {"table": "attempts"}) or 0) >= 50


def test_heartbeats_write_no_index(engine: Engine) -> None:
    claimed = claim(engine, submit(engine, 8))
    before = num_updates(engine)
    beat_often(engine, claimed, num_beats=100)

    for table, (num_rows, num_in_place) in num_updates(engine).items():
        rows = num_rows - before[table][0]
        in_place = num_in_place - before[table][1]
        assert rows >= 800
        assert in_place >= 0.9 * rows, f"{table}: only {in_place} of {rows} stayed in their page"


def beat_often(engine: Engine, claimed: list[ClaimedJob], *, num_beats: int) -> None:
    """Four tokens more with each, and the statistics written at once."""
    for number in range(num_beats):
        beats = [
            Beat(job_id=job.job_id, fence=job.fence, start=4 * number, ids=(1, 2, 3, 4))
            for job in claimed
        ]
        with engine.begin() as connection:
            assert len(leases.heartbeat(connection, beats, lease_s=LONG_S)) == len(claimed)
            connection.execute(text("SELECT pg_stat_force_next_flush()"))


def num_updates(engine: Engine) -> dict[str, tuple[int, int]]:
    """Of the tables that heartbeats write: versions of rows, and those that needed no entry in an
    index (HOT)."""
    with engine.begin() as connection:
        rows = connection.execute(text(UPDATES)).all()
    return {row.relname: (row.n_tup_upd, row.n_tup_hot_upd) for row in rows}


def test_a_growing_value_is_warned_of_at_its_bound_and_at_each_doubling() -> None:
    bound = DoublingThreshold(10)
    assert [value for value in range(0, 100, 5) if bound.reached(value)] == [10, 20, 40, 80]


def test_a_new_relay_watches_growth(database_url: str, redis_url: str) -> None:
    relay = Relay(RelaySettings(database_url=database_url, redis_url=redis_url))
    assert [loop.name for loop in relay._loops if isinstance(loop, Growth)] == ["growth"]
