"""A whole stack whose Redis is what Sentinels name: it goes on after the primary dies, and after it
steps down."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.standalone.settings import CLERK
from shardline.client import Client
from tests.faults.test_failover import LONG, REQUEST, answers, by_celery
from tests.polling import until
from tests.sentinel_pair import SentinelPair
from tests.stack import Stack


@pytest.fixture
def pair() -> Iterator[SentinelPair]:
    home = Path(tempfile.mkdtemp(prefix="shardline-pair-"))
    pair = SentinelPair(home)
    try:
        pair.start()
        yield pair
    finally:
        pair.end()
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def stack(pair: SentinelPair) -> Iterator[Stack]:
    folder = Path(tempfile.mkdtemp(prefix="shardline-sentinel-"))
    url = pair.url()
    stack = Stack(
        folder,
        SHARDLINE_MODEL=str(CLERK),
        SHARDLINE_REDIS_URL=url,
        SHARDLINE_RESULT_BACKEND=url,
    )
    try:
        stack.start()
        yield stack
    finally:
        stack.end()
        shutil.rmtree(folder, ignore_errors=True)


def test_every_door_and_head_follows_the_primary(stack: Stack, pair: SentinelPair) -> None:
    processes = stack.look()["processes"]
    with Client(database_url=stack.urls["database"], redis_url=stack.urls["redis"]) as client:
        for change in (pair.kill_primary, pair.fail_over):
            assert answers(stack)
            running = [client.submit(**LONG) for _ in range(4)]

            change()

            until(lambda: answers(stack))
            by_celery(stack, client)
            assert len(client.wait([*running, client.submit(**REQUEST)], 300)) == 5
    assert stack.look()["processes"] == processes, "no process has ended"
