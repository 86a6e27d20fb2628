"""The producers' side of each door: what arrives in Postgres or Redis when a producer has pushed
its prompts."""

from __future__ import annotations

import json

import pytest
import redis

from services.standalone.demo.producers import DOORS, Producer, submit
from services.standalone.demo.report import DemoPrompt, summarize
from shardline.contract import keys
from shardline.contract.queues import INTAKE_QUEUE
from shardline.store.connection.database import transaction
from shardline.store.statistics import costs, reports

PROMPTS = ["sort: 2, 1 =", "sort: 4, 3 ="]


@pytest.fixture
def producer(database_url: str, redis_url: str) -> Producer:
    return Producer(urls={"database": database_url, "redis": redis_url}, api_key="", model="clerk")


@pytest.mark.parametrize("door", ["client", "sql"])
def test_rows_are_stored_when_a_postgres_door_returns(producer: Producer, door: str) -> None:
    ids = submit(producer, door, PROMPTS)
    with transaction(producer.urls["database"]) as connection:
        states = reports.states(connection, ids)
        outcomes = reports.outcomes(connection, ids)
        spent = costs.spent(connection, ids)
        assert reports.sample(connection, ids) == [], "none has a result"
    assert states == dict.fromkeys(ids, "queued")
    found = {row["id"]: row["prompt"] for row in outcomes}
    assert [found[each] for each in ids] == PROMPTS
    asked = [DemoPrompt(id=each, door=door, task="sort", answer="1") for each in ids]
    assert summarize(asked, outcomes, spent=spent, flower_tasks_seen=0).result_rows == 0
    assert spent == dict.fromkeys(("energy_j", "cost", "carbon_g", "energy_source")), (
        "nothing has run"
    )


def test_each_entry_of_the_stream_door_is_one_request(producer: Producer) -> None:
    ids = submit(producer, "redis", PROMPTS)
    entries = redis.Redis.from_url(producer.urls["redis"]).xrange(keys.INTAKE) or []
    requests = [json.loads((fields or {})[b"request"]) for _, fields in entries]
    assert [request["id"] for request in requests] == [str(each) for each in ids]
    assert [request["prompt"] for request in requests] == PROMPTS


def test_tasks_of_the_celery_door_are_in_the_queue_of_relays(producer: Producer) -> None:
    ids = submit(producer, "celery", PROMPTS)
    messages = redis.Redis.from_url(producer.urls["redis"]).lrange(INTAKE_QUEUE, 0, -1)
    assert isinstance(messages, list)
    assert {json.loads(message)["headers"]["id"] for message in messages} == {
        str(each) for each in ids
    }


def test_there_are_five_doors() -> None:
    assert list(DOORS) == ["client", "celery", "redis", "sql", "http"]
