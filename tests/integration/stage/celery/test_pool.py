"""A real Celery worker with the stage's pool on a real Valkey: how many messages it lets in, and
which."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker
from redis import Redis
from redis.exceptions import ConnectionError as HungUp

from services.stage.app import make_app
from services.stage.celery.bootsteps import SeatLimit
from services.stage.celery.delivery import Delivery
from services.stage.celery.hub_calls import HubCalls
from services.stage.hop.wakeup import Wakeup
from services.stage.settings import StageSettings
from shardline.contract.queues import GENERATE_TASK
from tests.poisoned_messages import envelope, poisons
from tests.polling import until

QUEUE = "seating"
SEATS = 4
INTERACTIVE_SEATS = 2
NUM_RECONNECTS = 20
UNREADABLE = (
    '{"status": "REVOKED", "result": {"id": "a completion is no exception"}, "task_id": "x"}'
)


@dataclass(slots=True)
class HoldingHandler:
    """Keeps deliveries, and settles none unless told."""

    held: list[Delivery] = field(default_factory=list)

    def offer(self, delivery: Delivery) -> None:
        self.held.append(delivery)

    def cancel(self, job_ids: Sequence[str]) -> int:
        return len(job_ids)

    def close(self) -> None:
        self.give_back()

    def give_back(self) -> None:
        while self.held:
            self.held.pop().drop()

    def stats(self) -> Mapping[str, Any]:
        return {}

    def priorities(self) -> list[int]:
        """Of what is held."""
        return sorted(delivery.priority for delivery in self.held)

    def end(self, priority: int) -> None:
        """One of them is done."""
        delivery = next(delivery for delivery in self.held if delivery.priority == priority)
        self.held.remove(delivery)
        delivery.drop()


@pytest.fixture
def app(redis_url: str) -> Celery:
    """A stage's app, as it would be without a stage."""
    settings = StageSettings(
        model="m", redis_url=redis_url, seats=SEATS, interactive_seats=INTERACTIVE_SEATS
    )
    app = make_app(settings.model_copy(update={"result_backend": redis_url}))
    app.shardline = SimpleNamespace(
        delivery_handler=HoldingHandler(),
        hub=HubCalls(Wakeup()),
        drain_s=5.0,
        skips_drain=False,
        interactive_seats=INTERACTIVE_SEATS,
    )
    app.conf.broker_connection_retry_on_startup = True
    return app


@pytest.fixture
def handler(app: Celery) -> Iterator[HoldingHandler]:
    """Of a worker that consumes."""
    app.amqp.queues.select_add(QUEUE)
    with start_worker(
        app,
        concurrency=SEATS,
        pool=app.conf.worker_pool,
        perform_ping_check=False,
        shutdown_timeout=60,
    ):
        yield app.shardline.delivery_handler


def test_a_head_takes_no_queue_that_a_broadcast_names(
    app: Celery, handler: HoldingHandler, redis_url: str
) -> None:
    (answer,) = app.control.add_consumer("emails", reply=True)
    assert "no consumer of 'emails'" in str(answer)
    with Redis.from_url(redis_url) as redis:
        redis.lpush("emails", json.dumps(envelope("emails.send", "emails")))
        send(app, num=1, priority=5)
        until(lambda: handler.priorities() == [5])
        assert redis.llen("emails") == 1


def send(app: Celery, num: int, priority: int) -> None:
    """Jobs of one priority."""
    for _ in range(num):
        job_id = str(uuid4())
        app.send_task(GENERATE_TASK, args=[job_id], task_id=job_id, queue=QUEUE, priority=priority)


def hang_up() -> None:
    """What Celery's event loop meets when Redis closes the connection."""
    raise HungUp("Connection closed by server.")


def test_verdicts_ask_no_result_backend_which_may_hold_anything(
    app: Celery, handler: HoldingHandler, redis_url: str
) -> None:
    send(app, 2, 5)
    until(lambda: len(handler.held) == 2)
    with Redis.from_url(redis_url) as redis:
        for delivery in handler.held:
            redis.set(f"celery-task-meta-{delivery.job_id}", UNREADABLE)
    handler.held.pop().revoke()
    handler.held.pop().fail("it broke")

    send(app, SEATS, 5)

    until(lambda: len(handler.held) == SEATS)


def test_interactive_jobs_get_their_own_seats_beside_batch_jobs(
    app: Celery, handler: HoldingHandler
) -> None:
    send(app, 20, 5)
    until(lambda: handler.priorities() == [5] * SEATS)

    send(app, 3, 3)

    until(lambda: handler.priorities() == [3] * INTERACTIVE_SEATS + [5] * SEATS)
    handler.end(3)
    until(lambda: handler.priorities() == [3] * INTERACTIVE_SEATS + [5] * SEATS)
    for _ in range(3):
        handler.end(5)
    until(lambda: len(handler.held) == SEATS)


def test_no_message_in_a_heads_queue_ends_it_or_keeps_a_seat(
    app: Celery, handler: HoldingHandler, redis_url: str
) -> None:
    poisoned = poisons(GENERATE_TASK, QUEUE)
    with Redis.from_url(redis_url) as redis:
        for poison in poisoned.values():
            job_id = str(uuid4())
            good = envelope(GENERATE_TASK, QUEUE, [[job_id], {}, {}], job_id)
            redis.lpush(QUEUE, poison)
            redis.lpush(QUEUE, json.dumps(good))
            until(lambda: handler.held)
            assert [delivery.job_id for delivery in handler.held] == [job_id]
            handler.held.pop().drop()
        until(lambda: redis.hlen("unacked") == 0)


def test_a_full_pool_takes_no_more_than_its_seats_when_redis_hangs_up(
    app: Celery, handler: HoldingHandler
) -> None:
    send(app, 200, 5)
    send(app, 200, 3)
    until(lambda: len(handler.held) >= SEATS + INTERACTIVE_SEATS)
    connected = threading.Semaphore(0)
    start = SeatLimit.start

    def counted(step: Any, consumer: Any) -> None:
        start(step, consumer)
        connected.release()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SeatLimit, "start", counted)
        for _ in range(NUM_RECONNECTS):
            app.shardline.hub.post(hang_up)
            assert connected.acquire(timeout=60), "the worker did not connect again"

    room = SEATS + INTERACTIVE_SEATS
    assert room <= len(handler.held) <= room + 2, "one message for each channel may be on its way"
