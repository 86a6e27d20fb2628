"""The intake's one duty towards what it took: no entry is acknowledged before its row is committed."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry
from redis import Redis
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from services.relay.intake import Intake
from shardline.config import Times
from shardline.keys import INTAKE, INTAKE_GROUP
from shardline.metrics import RelayMetrics
from shardline.store.database import connect
from tests.integration.store_world import MODEL, cell, world

TIMES = Times().scaled(0.002)
NOWHERE = "postgresql://shardline@127.0.0.1:1/none"


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    with world(database_url) as engine:
        yield engine


def intake(database: Engine, redis: Redis) -> Intake:
    """One relay's, turned by hand."""
    return Intake(database=database, redis=redis, times=TIMES, batch=8, metrics=RelayMetrics(CollectorRegistry()))


def test_given_postgres_away_when_entries_are_taken_then_they_stay_unacknowledged_for_the_next_relay(
    engine: Engine, redis_url: str
) -> None:
    redis, away = Redis.from_url(redis_url), connect(NOWHERE)
    redis.xgroup_create(INTAKE, INTAKE_GROUP, id="0", mkstream=True)
    redis.xadd(INTAKE, {"request": json.dumps({"model": MODEL, "prompt": "one"})})

    with pytest.raises(OperationalError):
        intake(away, redis).turn()

    assert redis.xpending(INTAKE, INTAKE_GROUP)["pending"] == 1
    while redis.xlen(INTAKE):
        intake(engine, redis).turn()
    assert cell(engine, "SELECT count(*) FROM jobs") == 1
    redis.close()
    away.dispose()
