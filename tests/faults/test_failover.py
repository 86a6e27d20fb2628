"""A whole stack over two Postgres: a standby takes over, and back. Every door and head goes on."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from celery import Celery

from services.standalone.settings import CLERK
from shardline.base.config import Settings
from shardline.base.errors import NotFound, Unavailable
from shardline.client import Client
from shardline.contract.api_key import bearer
from shardline.contract.job import JobState
from shardline.contract.queues import INTAKE_QUEUE, SUBMIT_TASK, celery_settings
from tests.polling import until
from tests.postgres_pair import PostgresPair
from tests.stack import ForkedStack, Stack

REQUEST: dict[str, Any] = {
    "model": "clerk",
    "prompt": "sort: 3, 1, 2 =",
    "temperature": 0,
    "max_tokens": 16,
}
LONG: dict[str, Any] = {**REQUEST, "max_tokens": 400, "ignore_eos": True}


@pytest.fixture
def pair() -> Iterator[PostgresPair]:
    home = Path(tempfile.mkdtemp(prefix="shardline-pair-"))
    pair = PostgresPair(home)
    try:
        pair.start()
        yield pair
    finally:
        pair.end()
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(params=["two hosts", "one name"])
def stack(pair: PostgresPair, request: pytest.FixtureRequest) -> Iterator[Stack]:
    folder = Path(tempfile.mkdtemp(prefix="shardline-failover-"))
    url = pair.url() if request.param == "two hosts" else pair.url_of_name()
    stack = ForkedStack(folder, SHARDLINE_MODEL=str(CLERK), SHARDLINE_DATABASE_URL=url)
    try:
        stack.start()
        yield stack
    finally:
        stack.end()
        shutil.rmtree(folder, ignore_errors=True)


def answers(stack: Stack) -> bool:
    """Whether the HTTP door gives a completion; what it gives meanwhile is 503."""
    up = stack.look()
    reply = httpx.post(
        f"{up['urls']['gateway']}/v1/completions",
        json=REQUEST,
        headers=bearer(up["api_key"]),
        timeout=60,
    )
    assert reply.status_code in (200, 503), reply.text
    return reply.status_code == 200


def by_celery(stack: Stack, client: Client) -> None:
    """A task is sent once; a relay takes it when it can."""
    job_id = uuid4()
    with Celery("producer", set_as_current=False) as app:
        app.conf.update(celery_settings(Settings(redis_url=stack.urls["redis"])))
        app.send_task(SUBMIT_TASK, kwargs=REQUEST, task_id=str(job_id), queue=INTAKE_QUEUE)
    until(lambda: has_succeeded(client, str(job_id)))


def has_succeeded(client: Client, job_id: str) -> bool:
    """Not yet, where there is no such job yet or nobody can say."""
    try:
        return client.get(job_id).state is JobState.SUCCEEDED
    except (NotFound, Unavailable):
        return False


def test_every_door_and_head_goes_on_after_a_failover_and_back(
    stack: Stack, pair: PostgresPair
) -> None:
    processes = stack.look()["processes"]
    is_one_name = stack.urls["database"] == pair.url_of_name()
    with Client(database_url=stack.urls["database"], redis_url=stack.urls["redis"]) as client:
        for _ in range(2):
            assert answers(stack)
            running = client.submit(**LONG)

            pair.fail_over()
            pair.rejoin()
            if is_one_name:
                # The name still leads to what is a standby now: pools fill with sessions that read
                # only.
                assert not any(answers(stack) for _ in range(8))
                pair.move_name()

            until(lambda: answers(stack))
            by_celery(stack, client)
            assert len(client.wait([running, client.submit(**REQUEST)], 300)) == 2
    assert stack.look()["processes"] == processes, "no process has ended"
