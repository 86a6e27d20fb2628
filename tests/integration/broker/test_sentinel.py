"""Sentinels, real ones: redis-py, Celery, its result backend and Flower reach the primary, and the
next one after a failover."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from services.relay.celery.chord_backend import ChordBackend
from services.relay.celery.once_transport import sending
from services.relay.celery.task_ends import make_ends_app
from services.relay.settings import RelaySettings
from shardline.base.redis import async_redis_client, redis_client
from tests.integration.broker.test_redis_url import WAYS, Way, by_flower, by_remote_control
from tests.polling import PATIENCE_S, until
from tests.sentinel_pair import SentinelPair, sentinel_pair

TIMEOUT_S = 5.0
AWAY = (RedisError, OperationalError, OSError)


@pytest.fixture(scope="module")
def pair() -> Iterator[SentinelPair]:
    with sentinel_pair() as pair:
        yield pair


def heard(pair: SentinelPair) -> dict[str, int]:
    """How many keys came to which database of the primary, where none is afterwards."""
    with redis.Redis.from_url(pair.primary.url) as client:
        keyspace: Any = client.info("keyspace")
        client.flushall()
    return {name: found["keys"] for name, found in keyspace.items()}


@pytest.mark.parametrize("way", WAYS)
def test_every_library_reaches_the_server_that_sentinels_name(pair: SentinelPair, way: Way) -> None:
    for lost_first in (False, True):
        if way is by_flower:
            # It asks the first alone, and reads.
            with redis.Redis.from_url(pair.primary.url) as client:
                client.rpush("any", 1)
            way(pair.url())
            assert heard(pair) == {"db0": 1}
            return
        way(pair.url(3, lost_first=lost_first))
        assert way is by_remote_control or list(heard(pair)) == ["db3"]


def test_without_a_primary_the_error_is_short_and_tells_no_password() -> None:
    url = "sentinel://:secret@127.0.0.1:1/0?master_name=main&sentinel_password=secret"
    problem = "^no Sentinel that answers knows a primary named 'main'$"
    with redis_client(url, timeout_s=TIMEOUT_S) as client, pytest.raises(RedisError, match=problem):
        client.ping()

    async def ask() -> None:
        client = async_redis_client(url, timeout_s=TIMEOUT_S)
        try:
            await client.ping()
        finally:
            await client.aclose()

    with pytest.raises(RedisError, match=problem):
        asyncio.run(ask())


def test_callbacks_leave_once_and_results_are_kept_there(pair: SentinelPair) -> None:
    url = pair.url(3)
    app = make_ends_app(RelaySettings(redis_url=url, result_backend=url))
    with sending("sends"):
        for _ in range(2):
            app.send_task("foreign", task_id="one", queue="called")
    app.backend.store_result("one", 7, "SUCCESS")

    assert isinstance(app.backend, ChordBackend)
    assert app.AsyncResult("one").get(timeout=TIMEOUT_S) == 7
    with redis_client(url, timeout_s=TIMEOUT_S) as client:
        assert client.llen("called") == 1


def test_clients_follow_the_primary_whether_it_died_or_steps_down(pair: SentinelPair) -> None:
    async def follow() -> None:
        patient = async_redis_client(pair.url(), timeout_s=TIMEOUT_S)
        with redis_client(pair.url(), timeout_s=TIMEOUT_S) as client:
            for change in (pair.kill_primary, pair.fail_over):
                await count(client, patient)
                heard(pair)
                await asyncio.to_thread(change)
                await count(client, patient)
                assert heard(pair)["db0"] == 2
        await patient.aclose()

    asyncio.run(asyncio.wait_for(follow(), PATIENCE_S))


async def count(client: redis.Redis, patient: redis.asyncio.Redis) -> None:
    """Until each of them was answered."""
    await asyncio.to_thread(until, lambda: counts(client))
    while not await counts_too(patient):
        pass


def counts(client: redis.Redis) -> bool:
    try:
        client.incr("threads")
    except AWAY:
        return False
    return True


async def counts_too(client: redis.asyncio.Redis) -> bool:
    try:
        await client.incr("asyncio")
    except AWAY:
        return False
    return True
