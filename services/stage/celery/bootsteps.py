"""What a stage does at each connect of Celery to Redis: it lets in one message for each of its
seats. Knows no job.

kombu counts unacknowledged messages for each connection, so after a reconnect it would let in a
batch more. Here the pool counts. A second channel, which sees the messages of interactive jobs
alone, goes on while all seats for any job are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kombu.common import ignore_errors

from shardline.contract.job import INTERACTIVE
from shardline_server.broker import Reconnecting, guard


class SeatLimit(Reconnecting):
    """Messages of jobs are never put back by the worker that took them: the relay knows better
    which to send again."""

    def start(self, c: Any) -> None:
        """Runs at every connect."""
        super().start(c)
        _seat(c.task_consumer.channel, c.pool.has_seat)
        channel = c.connection.channel()
        guard(channel)
        channel.priority_steps = [step for step in channel.priority_steps if step in INTERACTIVE]
        _seat(channel, c.pool.has_interactive_seat)
        c.interactive_consumer = c.app.amqp.TaskConsumer(
            channel, on_message=c.create_task_handler(), on_decode_error=c.on_decode_error
        )
        c.interactive_consumer.consume()

    def stop(self, c: Any) -> None:
        """Runs at every disconnect, and when the worker stops."""
        super().stop(c)
        ignore_errors(c, c.interactive_consumer.cancel)


def _seat(channel: Any, has_seat: Callable[[], bool]) -> None:
    """A message that is on its way is let in, one for each channel: held back, an interactive one
    would wait in the socket for a seat that it does not need."""
    channel.do_restore = False
    # kombu has no other word for it.
    channel.qos.can_consume = lambda: has_seat() or bool(channel._in_poll)  # noqa: SLF001 (kombu's)
