"""The judge of what is held: each kind of growth, made by hand in real servers, is found; an honest
end passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from uuid import UUID, uuid4

import psycopg
import pytest
import redis

from shardline.contract import keys
from tests.chaos.judge.growth import (
    ENTRIES_PER_ATTEMPT,
    MIB,
    SCRAP_BYTES,
    Life,
    in_postgres,
    in_redis,
    redis_bytes,
)

JOB = """
INSERT INTO jobs (id, model, prompt, state, fence, finished_at)
VALUES (%s, 'clerk', 'text', 'cancelled', 2, now())
"""


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def job_id(database_url: str, client: redis.Redis) -> UUID:
    """A job of two attempts, with its stream."""
    job_id = uuid4()
    with psycopg.connect(database_url) as connection:
        connection.execute(JOB, (job_id,))
    write(client, job_id, 2 * ENTRIES_PER_ATTEMPT)
    return job_id


def write(client: redis.Redis, job_id: UUID, num: int) -> None:
    """So many entries more, in a stream that expires."""
    pipeline = client.pipeline()
    for _ in range(num):
        pipeline.xadd(keys.job_stream(job_id), {"d": "delta"})
    pipeline.expire(keys.job_stream(job_id), keys.STREAM_TTL_S)
    pipeline.execute()


def found(redis_url: str, database_url: str) -> str:
    """In Redis; the growth is counted from nothing."""
    with redis.Redis.from_url(redis_url) as client:
        held_bytes = client.info("memory")["used_memory"]
    return " ".join(
        str(each) for each in in_redis(redis_url, database_url, held_bytes, quiet_s=0.5)
    )


@pytest.mark.usefixtures("job_id")
def test_expiring_streams_and_short_queues_are_no_finding(
    redis_url: str, database_url: str, client: redis.Redis
) -> None:
    client.lpush("shardline.generate.clerk\x06\x163", "message")
    client.sadd("_kombu.binding_permanent.shardline.stage.a.0", "somebody")
    client.set(keys.OUTBOX_MARK, "1")
    assert found(redis_url, database_url) == ""


def test_a_stream_with_an_entry_too_many_is_found(
    redis_url: str, database_url: str, client: redis.Redis, job_id: UUID
) -> None:
    write(client, job_id, 1)
    assert f"{2 * ENTRIES_PER_ATTEMPT + 1} entries" in found(redis_url, database_url)


def test_a_stream_that_never_expires_is_found(
    redis_url: str, database_url: str, client: redis.Redis, job_id: UUID
) -> None:
    client.persist(keys.job_stream(job_id))
    assert "never expire" in found(redis_url, database_url)


def test_a_request_that_nobody_takes_is_found_in_the_intake(
    redis_url: str, database_url: str, client: redis.Redis
) -> None:
    client.xadd(keys.INTAKE, {"request": "{}"})
    assert "never empty" in found(redis_url, database_url)


def test_a_queue_that_grew_is_found_by_name_and_by_memory(
    redis_url: str, database_url: str, client: redis.Redis
) -> None:
    before_bytes = redis_bytes(redis_url)
    client.lpush("unacked_by_nobody", "x" * (SCRAP_BYTES + MIB))
    whats = [str(each) for each in in_redis(redis_url, database_url, before_bytes)]
    assert len(whats) == 2
    assert "unacked_by_nobody" in whats[0]
    assert "more than before" in whats[1]


def test_one_session_too_many_and_one_idle_in_transaction_are_found(database_url: str) -> None:
    def whats(num_own: int, lease_s: float) -> list[str]:
        judged = in_postgres(
            database_url, ["flower"], num_own=num_own, lease_s=lease_s, quiet_s=0.5
        )
        return [str(each) for each in judged]

    with ExitStack() as opened:
        first, _ = (opened.enter_context(closing(psycopg.connect(database_url))) for _ in range(2))
        assert whats(2, 60) == []
        assert "2 connections, of 1" in whats(1, 60)[0]
        first.execute("SELECT 1")
        assert "1 transactions" in whats(2, 0)[0]


@pytest.mark.parametrize(
    ("name", "is_too_much"),
    [("relay", True), ("stage-0", False), ("worker-1", False), ("flower", False)],
)
def test_memory_may_double_only_for_kv_and_for_flowers_tasks(name: str, is_too_much: bool) -> None:
    life = Life(name=name, warm_bytes=50 * MIB, last_bytes=100 * MIB)
    assert (life.growth_bytes > life.growth_max_bytes) == is_too_much


def test_a_process_that_is_not_warm_has_not_grown() -> None:
    assert Life(name="relay", last_bytes=80 * MIB).growth_bytes == 0
