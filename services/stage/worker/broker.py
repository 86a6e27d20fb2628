"""What a stage does when Celery's connection to Redis ends: nothing is put back. Knows no job."""

from __future__ import annotations

from typing import Any

from shardline.broker import Reconnecting


class Unacknowledged(Reconnecting):
    """Messages of jobs are never put back by the worker that took them: the relay knows better which to send again."""

    def start(self, c: Any) -> None:
        """Runs at every connect."""
        super().start(c)
        c.task_consumer.channel.do_restore = False
