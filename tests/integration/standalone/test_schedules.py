"""Schedules on a whole stack: made over HTTP, fired by its relay, and once each, also where that is
killed with the job written and not committed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from sqlalchemy import Engine, text

from services.standalone.processes import wait_until_gone
from shardline.client import Client
from shardline.contract.api_key import bearer
from shardline_server.failpoints import Point
from tests.chaos.faults.arming import arm
from tests.polling import until
from tests.stack import ForkedStack, Stack

NAME = "nightly"
REQUEST = {"model": "clerk", "prompt": "sort: 3, 1, 2 =", "temperature": 0, "max_tokens": 16}
FIRED = text("SELECT id FROM jobs WHERE metadata ->> 'schedule' = :name ORDER BY created_at, id")
DUE = text("UPDATE schedules SET next_at = clock_timestamp() WHERE name = :name")
LAST = text("SELECT last_job_id FROM schedules WHERE name = :name AND next_at > now()")


@pytest.fixture(scope="module")
def failpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("failpoints")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, failpoints: Path) -> Iterator[Stack]:
    settings = {"SHARDLINE_STAGES": "1", "SHARDLINE_FAILPOINTS": str(failpoints)}
    stack = ForkedStack(tmp_path_factory.mktemp("stack"), **settings)
    stack.start()
    yield stack
    stack.end()
    assert stack.left() == []


def fired(database: Engine) -> list[str]:
    with database.begin() as connection:
        return [str(job_id) for job_id in connection.scalars(FIRED, {"name": NAME})]


def last(database: Engine) -> str:
    with database.begin() as connection:
        return str(connection.scalar(LAST, {"name": NAME}))


def become_due(database: Engine) -> None:
    with database.begin() as connection:
        connection.execute(DUE, {"name": NAME})


def test_each_time_is_one_job_whenever_the_relay_is_killed(
    stack: Stack, failpoints: Path, database: Engine, client: Client
) -> None:
    schedules = f"{stack.urls['gateway']}/v1/schedules"
    key = bearer(stack.urls["api_key"])
    body = {"name": NAME, "cron": "0 7 1 1 *", "time_zone": "Europe/Berlin", "request": REQUEST}
    made = httpx.post(schedules, json=body, headers=key)
    assert made.status_code == 200, made.text

    become_due(database)
    until(lambda: len(fired(database)) == 1)

    # Given a relay that dies with the job and the next time written, and not committed
    arming = arm(failpoints, Point.SCHEDULE_FIRED)
    become_due(database)
    arming.wait()
    until(lambda: len(fired(database)) == 2)
    assert last(database) == fired(database)[1]

    # Given one that dies right after it has fired
    relay = psutil.Process(stack.look()["processes"]["relay"])
    relay.kill()
    assert wait_until_gone(relay, timeout_s=30)
    become_due(database)
    until(lambda: len(fired(database)) == 3)
    until(lambda: last(database) == fired(database)[2])

    ends = client.wait([*fired(database)])
    texts = [end.result.text for end in ends if end.result]
    assert (len(texts), len(set(texts))) == (3, 1), "the same request, greedy"
    shown = httpx.get(f"{schedules}/{made.json()['id']}", headers=key).json()
    assert (shown["last_job_id"], shown["last_error"]) == (fired(database)[2], None)
    assert httpx.delete(f"{schedules}/{made.json()['id']}", headers=key).status_code == 200
