"""When a head takes jobs: only while its pipeline is ready. Owns the subscription to the model's
queue."""

from __future__ import annotations

from typing import Any

from services.stage.celery.hub_calls import HubCalls


class QueueSubscription:
    """`open` and `close` may be called from any thread and at any time; they act in Celery's
    thread, in order.

    Celery keeps the choice of queues over a reconnect, and asks for none while it is disconnected.
    """

    def __init__(self, queue: str, hub: HubCalls) -> None:
        self._queue = queue
        self._hub = hub
        self._wanted = False
        self._consumer: Any = None

    def attach(self, consumer: Any) -> None:
        """Celery's thread: its consumer is up."""
        self._consumer = consumer
        self._apply()

    def open(self) -> None:
        """Jobs may come."""
        self._want(wanted=True)

    def close(self) -> None:
        """No more jobs; those delivered keep their seats."""
        self._want(wanted=False)

    def _want(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._hub.post(self._apply)

    def _apply(self) -> None:
        consumer = self._consumer
        if consumer is None:
            return
        queues = consumer.app.amqp.queues
        if consumer.task_consumer is None or not consumer.connection:
            # Disconnected: the next connection subscribes to what is selected now.
            if self._wanted:
                queues.select_add(self._queue)
            else:
                queues.deselect(self._queue)
        elif self._wanted:
            consumer.add_task_queue(self._queue)
            consumer.interactive_consumer.add_queue(queues[self._queue])
            consumer.interactive_consumer.consume()
        else:
            consumer.cancel_task_queue(self._queue)
            consumer.interactive_consumer.cancel_by_queue(self._queue)
