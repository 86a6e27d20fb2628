"""What our Celery workers do when Redis ends, is full or refuses: they stay, and connect again.
They take no queue that another team's remote control names. Imports Celery, so only workers import
it.

Messages that were not acknowledged are no loss: relays send again what no head has claimed, a claim
drops what comes twice, and what a relay had taken comes back after its visibility timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import structlog
from celery import bootsteps
from celery.app.control import Control
from celery.app.utils import filter_hidden_settings
from celery.worker import state
from celery.worker.control import control_command, nok
from kombu.pidbox import Mailbox
from kombu.utils.url import maybe_sanitize_url
from redis.exceptions import ResponseError

from shardline_server.message_guard import MessageGuard, RefusedMessage

log = structlog.get_logger(__name__)

MAX_TOLD = 80
"""Characters of a queue's name in an answer."""
EVENTS_S = 0.05
"""So long a task's events wait for others, to travel as one message."""
MAX_EVENTS = 1_000
"""In one message."""
ANSWER_KEPT_MS = 60_000
"""Longer than anybody waits: kombu itself would keep the queue of answers for ten seconds."""


class ExpiringMailbox(Mailbox):
    """An answer to one who was killed, or waits no longer, leaves Redis. kombu (5.7) knows when the
    queue expires only where it was made, which is not where an answer is put into it: it would stay
    for ever."""

    def _publish_reply(
        self,
        reply: Any,
        exchange: str,
        routing_key: str,
        ticket: str,
        channel: Any = None,
        *more: Any,
        **options: Any,
    ) -> None:
        super()._publish_reply(reply, exchange, routing_key, ticket, channel, *more, **options)
        with channel.conn_or_acquire() as client:
            client.pexpire(f"{routing_key}.{exchange}", ANSWER_KEPT_MS)


class ExpiringControl(Control):
    """What `celery inspect` and Flower ask of a worker."""

    Mailbox = ExpiringMailbox


@control_command(
    args=[("queue", str), ("exchange", str), ("exchange_type", str), ("routing_key", str)],
    signature="<queue> [exchange [type [routing_key]]]",
)
def add_consumer(state: Any, queue: Any, **_: Any) -> dict[str, Any]:  # noqa: ARG001 (Celery's)
    """Refuse, instead of Celery's own command: without a destination it is for all workers of a
    broker, and ours would take another app's tasks and drop them."""
    return nok(
        f"no consumer of {str(queue)[:MAX_TOLD]!r}: Shardline's workers take their own queues only."
        " Name your app's workers as destination"
    )


class Reconnecting(bootsteps.StartStopStep):
    """A step of Celery's consumer: runs at every connect and disconnect, in Celery's thread."""

    requires = ("celery.worker.consumer:Tasks",)

    def __init__(self, c: Any, **options: Any) -> None:
        """A server that is full, read-only or cannot save answers with an error: to Celery (5.7)
        that is a bug of ours, which ends the worker, and with it a stage's weights and batch."""
        super().__init__(c, **options)
        c.connection_errors = (*c.connection_errors, ResponseError)
        self._guard = MessageGuard(c, partial(self.refuse, c), self.check)

    def start(self, c: Any) -> None:
        """Runs at every connect."""
        guard(c.task_consumer.channel)
        gather_events(c)
        self._guard.watch(c.task_consumer.channel.connection)

    def stop(self, c: Any) -> None:
        """An acknowledgement would go to the channel that brought the message: it is gone. The
        timer of events runs no more, while tasks still end."""
        if c.event_dispatcher is not None:
            c.event_dispatcher.on_send_buffered = c.event_dispatcher.flush
        for request in list(state.requests.values()):
            request.acknowledged = True

    def info(self, c: Any) -> dict[str, Any]:
        """Returns what `inspect stats` and Flower tell of the connection, in place of what Celery's
        own step returns: that has the passwords of Sentinels and of keys of TLS."""
        if c.connection is None:
            return {}
        told = c.connection.info()
        told["alternates"] = [maybe_sanitize_url(url) for url in told.get("alternates") or ()]
        told.pop("password")
        return {"broker": filter_hidden_settings(told)}

    def check(self, message: Any) -> None:
        """Raises for a task that this worker refuses: none."""

    def refuse(self, c: Any, refused: RefusedMessage) -> None:  # noqa: ARG002 (for who buries it)
        """Tells the log of a message that is no task, and not what it holds."""
        log.warning(
            "a message that is no task is dropped", task_id=refused.task_id, problem=refused.problem
        )


def gather_events(consumer: Any) -> None:
    """Publishes what waits every EVENTS_S, as one message, which Flower reads like single ones:
    Celery (5.7) publishes in each turn of its loop, and so nearly each event alone."""
    events = consumer.event_dispatcher
    is_due = False

    def publish() -> None:
        nonlocal is_due
        is_due = False
        events.flush(errors=False)

    def publish_soon() -> None:
        nonlocal is_due
        if not is_due:
            is_due = True
            consumer.hub.call_later(EVENTS_S, publish)

    events.buffer_limit = MAX_EVENTS
    events.on_send_buffered = publish_soon


def guard(channel: Any) -> None:
    """kombu (5.7) puts unacknowledged messages back when a channel closes, and Celery acknowledges
    some of them later still: without a connection both fail with an AttributeError, which ends the
    worker."""
    channel.basic_ack = _while_connected(channel, channel.basic_ack)
    channel.basic_reject = _while_connected(channel, channel.basic_reject)
    channel.qos.restore_unacked_once = _while_connected(channel, channel.qos.restore_unacked_once)


def _while_connected(channel: Any, method: Callable[..., None]) -> Callable[..., None]:
    """The method, or nothing once the channel has lost its connection."""

    @wraps(method)
    def guarded(*arguments: Any, **options: Any) -> None:
        if channel.connection is not None and channel.connection.client is not None:
            method(*arguments, **options)

    return guarded
