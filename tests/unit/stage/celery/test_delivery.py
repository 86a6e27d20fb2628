"""Deliveries, the hub calls and the pool that keeps them: Celery's side of a job, without a
broker."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from celery.exceptions import Ignore, Terminated
from kombu.serialization import dumps

from services.stage.celery.delivery import Delivery
from services.stage.celery.hub_calls import HubCalls
from services.stage.celery.pool import EnginePool
from services.stage.hop.wakeup import Wakeup
from shardline.base.errors import JobFailed


class NotingHandler:
    """Notes what the pool asks of it."""

    def __init__(self) -> None:
        self.offered: list[Delivery] = []
        self.calls: list[str] = []

    def offer(self, delivery: Delivery) -> None:
        self.offered.append(delivery)

    def cancel(self, job_ids: Sequence[str]) -> int:
        return len(job_ids)

    def close(self) -> None:
        self.calls.append("close")

    def give_back(self) -> None:
        self.calls.append("give_back")
        for delivery in self.offered:
            delivery.drop()

    def stats(self) -> Mapping[str, Any]:
        return {"live": len(self.offered)}


@pytest.fixture
def handler() -> NotingHandler:
    return NotingHandler()


@pytest.fixture
def pool(handler: NotingHandler) -> EnginePool:
    """A started pool that drains for no time at all."""
    stage = SimpleNamespace(
        delivery_handler=handler,
        hub=HubCalls(Wakeup()),
        drain_s=0.0,
        skips_drain=False,
        interactive_seats=2,
    )
    pool = EnginePool(limit=4, app=SimpleNamespace(shardline=stage))
    pool.on_start()
    return pool


def deliver(pool: EnginePool, task_id: str, *arguments: object) -> list[Any]:
    """One message, as Celery hands it to a pool; what Celery is told goes into the list."""
    content_type, content_encoding, body = dumps((list(arguments), {}, {}), "json")
    told: list[Any] = []

    def on_accepted(_number: int, _began_s: float) -> None:
        told.append("started")

    pool.on_apply(
        lambda: None,
        ("shardline.generate", task_id, {}, body, content_type, content_encoding),
        callback=told.append,
        accept_callback=on_accepted,
    )
    return told


def settle(pool: EnginePool) -> None:
    """What Celery's event loop does when the hub calls are readable."""
    pool.app.shardline.hub.take()


def ending(told: list[Any]) -> type[BaseException]:
    """The exception that ended a task."""
    _, value, _ = told[-1]
    return type(value.exception.exc)


def test_celery_hears_started_and_the_value_of_a_succeeded_job(
    pool: EnginePool, handler: NotingHandler
) -> None:
    job_id = str(uuid4())
    told = deliver(pool, job_id, job_id)
    (delivery,) = handler.offered

    delivery.accept()
    worker = threading.Thread(target=delivery.succeed, args=({"completion_tokens": 3},))
    worker.start()
    worker.join()
    assert told == [], "nothing is said outside Celery's thread"
    settle(pool)

    started, (failed, value, _) = told
    assert (started, failed, value) == ("started", 0, {"completion_tokens": 3})


@pytest.mark.parametrize(
    ("verdict", "error"),
    [
        (Delivery.drop, Ignore),
        (Delivery.revoke, Terminated),
        (lambda delivery: delivery.fail("why"), JobFailed),
    ],
)
def test_celery_gets_the_exception_of_a_verdict(
    verdict: Any, error: type[BaseException], pool: EnginePool, handler: NotingHandler
) -> None:
    job_id = str(uuid4())
    told = deliver(pool, job_id, job_id)

    verdict(handler.offered[0])
    settle(pool)

    assert ending(told) is error


def test_the_first_of_two_final_verdicts_counts(pool: EnginePool, handler: NotingHandler) -> None:
    job_id = str(uuid4())
    told = deliver(pool, job_id, job_id)

    handler.offered[0].revoke()
    handler.offered[0].succeed({})
    settle(pool)

    assert len(told) == 1
    assert ending(told) is Terminated


@pytest.mark.parametrize(
    "arguments", [(), ("nonsense",), (None,), (str(uuid4()),), (str(uuid4()), 2)]
)
def test_a_message_without_its_jobs_id_is_dropped_unread(
    arguments: tuple[object, ...], pool: EnginePool, handler: NotingHandler
) -> None:
    told = deliver(pool, str(uuid4()), *arguments)
    settle(pool)

    assert handler.offered == []
    assert ending(told) is Ignore


def test_a_stopping_pool_gives_back_jobs_that_outlast_the_drain(
    pool: EnginePool, handler: NotingHandler
) -> None:
    pool._drain_s = 0.5
    job_id = str(uuid4())
    told = deliver(pool, job_id, job_id)

    pool.on_stop()

    assert handler.calls == ["close", "give_back"]
    assert ending(told) is Ignore


def test_a_pool_that_hurries_does_not_drain(pool: EnginePool, handler: NotingHandler) -> None:
    pool._drain_s = 30.0
    pool.app.shardline.skips_drain = True
    job_id = str(uuid4())
    told = deliver(pool, job_id, job_id)

    pool.on_stop()

    assert handler.calls == ["close", "give_back"]
    assert ending(told) is Ignore


def test_the_pool_counts_its_seats_over_all_lost_connections(
    pool: EnginePool, handler: NotingHandler
) -> None:
    """kombu asks before each message; after a reconnect its own count begins at 0."""
    for _ in range(20):
        for _ in range(pool.limit):
            if pool.has_seat():
                job_id = str(uuid4())
                deliver(pool, job_id, job_id)
        assert not pool.has_seat()

    assert len(handler.offered) == pool.limit
    assert pool.has_interactive_seat(), "the share of interactive jobs is free"
    for _ in range(2):
        job_id = str(uuid4())
        deliver(pool, job_id, job_id)
    assert not pool.has_interactive_seat()
    for delivery in handler.offered[:3]:
        delivery.drop()
    settle(pool)
    assert pool.has_seat()
