"""A whole stack whose Redis is what Sentinels name: it goes on after the primary dies, and after it
steps down."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from celery import Celery

from services.standalone.settings import CLERK
from shardline.base.config import Settings
from shardline.client import Client
from shardline.contract.queues import celery_settings
from tests.chaos.judge.secrecy import told
from tests.faults.test_failover import LONG, REQUEST, answers, by_celery
from tests.polling import until
from tests.sentinel_pair import PASSWORD, SENTINELS_PASSWORD, SentinelPair, sentinel_pair
from tests.stack import ForkedStack, Stack

SECRETS = {form for one in (PASSWORD, SENTINELS_PASSWORD) for form in (one, quote(one))}


@pytest.fixture
def pair() -> Iterator[SentinelPair]:
    with sentinel_pair() as pair:
        yield pair


@pytest.fixture
def stack(pair: SentinelPair) -> Iterator[Stack]:
    folder = Path(tempfile.mkdtemp(prefix="shardline-sentinel-"))
    url = pair.url()
    stack = ForkedStack(
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
    assert not told([*(stack.home.folder / "logs").iterdir(), stack.output], SECRETS)
    shown = json.dumps(what_workers_tell(stack.urls["redis"]))
    assert not [one for one in SECRETS if one in shown]


def what_workers_tell(redis_url: str) -> list[Any]:
    """Of their connections and settings, as Flower asks them."""
    with Celery("operator", set_as_current=False) as app:
        app.conf.update(celery_settings(Settings(redis_url=redis_url)))
        asked = app.control.inspect(timeout=5.0)
        answers = [asked.stats(), asked.conf(with_defaults=True)]
    assert all(len(answer) >= 2 for answer in answers), "a relay and a head"
    return answers
