"""The intake's one duty towards what it took: no entry is acknowledged before its row is
committed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from redis import Redis
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from services.relay.intake import Intake
from services.relay.loop import LoopContext
from shardline.base.config import Times
from shardline.contract.keys import INTAKE, INTAKE_DEAD, INTAKE_GROUP
from shardline.store.connection.database import connect
from shardline_server.metrics import RelayMetrics
from tests.integration.rows import MODEL, cell

TIMES = Times().scaled(0.002)
NOWHERE = "postgresql://shardline@127.0.0.1:1/none"


def intake(database: Engine, redis: Redis) -> Intake:
    """One relay's, turned by hand."""
    context = LoopContext(database=database, times=TIMES, metrics=RelayMetrics(CollectorRegistry()))
    return Intake(context, redis=redis, batch=8)


def test_entries_taken_without_postgres_stay_for_the_next_relay(
    engine: Engine, redis_url: str
) -> None:
    redis = Redis.from_url(redis_url)
    away = connect(NOWHERE)
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


@pytest.mark.parametrize("is_abandoned", [False, True], ids=["new", "of a dead relay"])
def test_entries_of_megabytes_are_taken_a_few_at_a_time_and_all_accepted(
    engine: Engine, redis_url: str, is_abandoned: bool
) -> None:
    """Five of 3 MB and a small one: a batch reads on while it has less than 8 MiB."""
    redis = Redis.from_url(redis_url)
    redis.xgroup_create(INTAKE, INTAKE_GROUP, id="0", mkstream=True)
    prompts = [*(["x" * 3_000_000] * 5), "one"]
    ids: list[Any] = [
        redis.xadd(INTAKE, {"request": json.dumps({"model": MODEL, "prompt": prompt})})
        for prompt in prompts
    ]
    if is_abandoned:
        redis.xreadgroup(INTAKE_GROUP, "dead", {INTAKE: ">"})
        redis.xclaim(INTAKE, INTAKE_GROUP, "dead", min_idle_time=0, message_ids=ids, idle=3_600_000)
    relay = intake(engine, redis)

    nums = []
    while redis.xlen(INTAKE):
        relay.turn()
        nums.append(cell(engine, "SELECT count(*) FROM jobs"))

    assert nums == [3, 6]
    assert redis.xpending(INTAKE, INTAKE_GROUP)["pending"] == 0
    redis.close()


def test_each_batch_takes_the_configured_number_of_entries(engine: Engine, redis_url: str) -> None:
    redis = Redis.from_url(redis_url)
    for number in range(20):
        redis.xadd(INTAKE, {"request": json.dumps({"model": MODEL, "prompt": f"number {number}"})})
    relay = intake(engine, redis)

    nums = []
    while redis.xlen(INTAKE):
        relay.turn()
        nums.append(cell(engine, "SELECT count(*) FROM jobs"))

    assert nums == [0, 8, 16, 20], "the first turn makes the group"
    redis.close()


def test_an_entry_that_another_relay_has_finished_is_not_refused(
    engine: Engine, redis_url: str
) -> None:
    redis = Redis.from_url(redis_url)
    redis.xgroup_create(INTAKE, INTAKE_GROUP, id="0", mkstream=True)
    requests = [{"model": MODEL, "prompt": "x" * size} for size in (9_000_000, 3)]
    ids: list[Any] = [redis.xadd(INTAKE, {"request": json.dumps(request)}) for request in requests]
    redis.xreadgroup(INTAKE_GROUP, "dead", {INTAKE: ">"})
    redis.xclaim(INTAKE, INTAKE_GROUP, "dead", min_idle_time=0, message_ids=ids, idle=3_600_000)
    relay = intake(engine, redis)

    relay.turn()
    redis.xdel(INTAKE, ids[1])
    relay.turn()

    assert cell(engine, "SELECT count(*) FROM jobs") == 1
    assert redis.exists(INTAKE_DEAD) == 0
    assert redis.xpending(INTAKE, INTAKE_GROUP)["pending"] == 0
    redis.close()
