"""What Redis may hold, on a real Valkey with little memory: whatever comes in, a job's message
finds room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis
from prometheus_client import CollectorRegistry
from sqlalchemy import Engine

from services.relay.intake import Intake
from services.relay.loop import LoopContext
from services.relay.rejects import MAX_REQUEST_CHARS, record_reject
from services.standalone.servers import Valkey
from shardline.base.config import Times
from shardline.contract.keys import INTAKE, INTAKE_DEAD, INTAKE_DEAD_MAX_BYTES, INTAKE_GROUP
from shardline.contract.wire import Delta
from shardline.streams import DeltaWriter
from shardline_server.metrics import RelayMetrics

MIB = 1 << 20
ROOM = "16mb"
NUM_STREAMS = 6_000
"""Of 4 KiB at least: more than there is room for."""

NUM_MESSAGES = 500
QUEUE = "shardline.generate.m"
REASON = {
    "code": "invalid_request",
    "field": "model",
    "problem": "it is missing",
    "remedy": "Name one",
}


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Valkey]:
    """A server of its own, as `make up` starts it but for its size."""
    server = Valkey(tmp_path, settings={"maxmemory": ROOM})
    server.start()
    yield server
    server.kill()


@pytest.fixture
def client(small: Valkey) -> Iterator[redis.Redis]:
    """For the test."""
    with redis.Redis.from_url(small.url) as client:
        yield client


def test_no_message_is_lost_when_finished_streams_outgrow_redis(
    small: Valkey, client: redis.Redis
) -> None:
    writer = DeltaWriter(small.url)
    for number in range(NUM_MESSAGES):
        client.lpush(QUEUE, f"{number}")
        for _ in range(NUM_STREAMS // NUM_MESSAGES):
            job_id = uuid4()
            writer.write([(job_id, Delta(fence=1, start=0, ids=(1,), text="a"))])
            writer.write(
                [(job_id, Delta(fence=1, start=1, state="succeeded", finish_reason="stop"))]
            )
    writer.close()

    assert client.info("stats")["evicted_keys"] > 0
    assert client.llen(QUEUE) == NUM_MESSAGES


def test_dead_intake_entries_keep_the_newest_within_a_few_megabytes(client: redis.Redis) -> None:
    for number in range(200):
        record_reject(client, entry=f"{number}-0", request="x" * MAX_REQUEST_CHARS, reason=REASON)

    held_bytes = client.memory_usage(INTAKE_DEAD, samples=0) or 0
    assert INTAKE_DEAD_MAX_BYTES / 4 < held_bytes <= INTAKE_DEAD_MAX_BYTES
    entries: Any = client.xrevrange(INTAKE_DEAD, count=1)
    ((_, newest),) = entries
    assert newest[b"entry"] == b"199-0"
    assert client.ttl(INTAKE_DEAD) > 0


def test_the_intake_goes_on_when_a_full_redis_refuses_an_entry(
    engine: Engine, client: redis.Redis
) -> None:
    client.xgroup_create(INTAKE, INTAKE_GROUP, id="0", mkstream=True)
    client.xadd(INTAKE, {"request": "no request"})
    metrics = RelayMetrics(CollectorRegistry())
    context = LoopContext(database=engine, times=Times().scaled(0.1), metrics=metrics)
    intake = Intake(context, redis=client, batch=16)
    client.config_set("maxmemory", 1)

    intake.turn()

    pending: Any = client.xpending(INTAKE, INTAKE_GROUP)
    assert (client.xlen(INTAKE), pending["pending"]) == (0, 0)
    assert not client.exists(INTAKE_DEAD)
