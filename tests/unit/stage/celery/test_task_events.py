"""What Flower hears of tasks travels as few messages."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from celery import Celery
from kombu.entity import Queue
from kombu.messaging import Consumer

from shardline_server.broker import EVENTS_S, Reconnecting, gather_events

NUM_EVENTS = 100


class Hub:
    """Celery's, with a timer that the test lets run out."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.calls.append((delay_s, call))


def test_events_of_many_tasks_travel_as_one_message() -> None:
    app = Celery(broker="memory://", set_as_current=False)
    hub = Hub()
    received: list[Any] = []
    with app.connection_for_write() as connection:
        events = app.events.Dispatcher(connection, hostname="stage@host", buffer_group=["task"])
        queue = Queue("flower", exchange=events.exchange, routing_key="task.#")
        with Consumer(connection, queue, on_message=received.append):
            gather_events(SimpleNamespace(event_dispatcher=events, hub=hub))
            for number in range(NUM_EVENTS):
                events.send("task-succeeded", uuid=str(number))
            ((delay_s, publish),) = hub.calls
            assert delay_s == EVENTS_S
            publish()
            connection.drain_events(timeout=5)

    (message,) = received
    assert [event["uuid"] for event in message.decode()] == [str(n) for n in range(NUM_EVENTS)]


def test_events_of_tasks_that_end_while_the_worker_stops_wait_for_nothing() -> None:
    app = Celery(broker="memory://", set_as_current=False)
    received: list[Any] = []
    with app.connection_for_write() as connection:
        events = app.events.Dispatcher(connection, hostname="stage@host", buffer_group=["task"])
        queue = Queue("flower", exchange=events.exchange, routing_key="task.#")
        consumer = SimpleNamespace(event_dispatcher=events, hub=Hub())
        with Consumer(connection, queue, on_message=received.append):
            gather_events(consumer)
            Reconnecting.stop(object.__new__(Reconnecting), consumer)
            events.send("task-succeeded", uuid="one")
            connection.drain_events(timeout=5)
    assert [event["uuid"] for event in received[0].decode()] == ["one"]


def test_an_event_after_a_message_starts_the_next_one() -> None:
    app = Celery(broker="memory://", set_as_current=False)
    hub = Hub()
    with app.connection_for_write() as connection:
        events = app.events.Dispatcher(connection, hostname="stage@host", buffer_group=["task"])
        gather_events(SimpleNamespace(event_dispatcher=events, hub=hub))
        events.send("task-started", uuid="one")
        hub.calls[0][1]()
        events.send("task-started", uuid="two")
    assert len(hub.calls) == 2
