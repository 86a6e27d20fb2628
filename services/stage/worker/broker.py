"""What a stage does when Celery's connection to Redis ends: nothing is acknowledged or restored over a dead one.

Messages that were not acknowledged are no loss: the relay sends again what no head has claimed, and a claim drops
what comes twice.
"""

from __future__ import annotations

from typing import Any

from celery import bootsteps
from celery.worker import state


class Unacknowledged(bootsteps.StartStopStep):
    """A step of Celery's consumer: runs at every connect and disconnect, in Celery's thread."""

    requires = ("celery.worker.consumer:Tasks",)

    def start(self, c: Any) -> None:
        """kombu (5.7) would put unacknowledged messages back when its channel closes; without a server it fails
        with an AttributeError there, which ends the worker."""
        c.task_consumer.channel.do_restore = False

    def stop(self, c: Any) -> None:  # noqa: ARG002 (the step's signature)
        """An acknowledgement would go to the channel that brought the message: it is gone."""
        for request in list(state.requests.values()):
            request.acknowledged = True
