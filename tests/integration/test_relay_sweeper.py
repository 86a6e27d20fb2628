"""The sweeper's figures on a real Postgres: every row that it moved is counted, whatever fails after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from services.relay.results import Results
from services.relay.sweeper import Sweeper
from shardline.config import Times
from shardline.metrics import RelayMetrics
from tests.integration.store_world import change, pass_time, running, submit, world

TIMES = Times().scaled(0.001)
"""The server is up for longer than such a lease."""


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """A fresh world."""
    with world(database_url) as engine:
        yield engine


@pytest.fixture
def registry() -> CollectorRegistry:
    """What a scraper reads."""
    return CollectorRegistry()


@pytest.fixture
def sweeper(engine: Engine, registry: CollectorRegistry) -> Sweeper:
    """A relay's, its turns called by the test."""
    metrics = RelayMetrics(registry)
    results = Results(backend_app=None, times=TIMES, metrics=metrics)
    return Sweeper(database=engine, results=results, times=TIMES, metrics=metrics)


def swept(registry: CollectorRegistry, outcome: str) -> float | None:
    """The counter."""
    return registry.get_sample_value("shardline_relay_swept_total", {"outcome": outcome})


def expired(engine: Engine, *, crashes: int = 0) -> None:
    """A job whose head died before its first token."""
    claimed = running(engine)
    change(engine, "UPDATE jobs SET crashes = :crashes WHERE id = :id", crashes=crashes, id=claimed.job_id)
    with engine.begin() as connection:
        pass_time(connection, claimed.job_id, "lease_until")


def test_given_jobs_that_crashed_when_swept_then_each_is_counted_by_what_became_of_it(
    engine: Engine, registry: CollectorRegistry, sweeper: Sweeper
) -> None:
    expired(engine)
    expired(engine, crashes=2)

    sweeper.turn()

    assert (swept(registry, "crashed"), swept(registry, "failed")) == (1, 1)


def test_given_rows_moved_by_the_first_sweep_when_the_second_fails_then_they_are_counted(
    engine: Engine, registry: CollectorRegistry, sweeper: Sweeper
) -> None:
    submit(engine)
    change(engine, "UPDATE jobs SET cancel_requested_at = now()")
    expired(engine)
    change(engine, "ALTER TABLE attempts ADD CONSTRAINT no_crash CHECK (outcome <> 'crashed')")

    with pytest.raises(DBAPIError, match="no_crash"):
        sweeper.turn()

    assert (swept(registry, "cancelled"), swept(registry, "crashed")) == (1, None)
