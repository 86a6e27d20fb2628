"""Gives up webhooks that no endpoint accepts, and deletes those that have ended. Sends none."""

from __future__ import annotations

from services.relay.loop import Loop, LoopContext
from services.relay.settings import RelaySettings
from shardline_server.store import webhook_attempts
from shardline_server.store.webhook_attempts import MAX_ENDED

DAY_S = 86_400.0
TURNS_APART = 60
"""Polls between two looks, when nothing is left to do."""


class WebhookKeeper(Loop):
    """Works in small transactions. A relay skips rows that another one has locked."""

    def __init__(self, context: LoopContext, settings: RelaySettings) -> None:
        super().__init__("webhook-keeper", context.metrics.errors)
        self._database = context.database
        self._metrics = context.metrics
        self._patience_s = settings.webhook_patience_days * DAY_S
        self._age_s = settings.webhook_keep_days * DAY_S
        self._pause_s = TURNS_APART * context.times.poll_s

    def turn(self) -> float:
        """One batch of each."""
        with self._database.begin() as connection:
            num_given_up = webhook_attempts.give_up(connection, patience_s=self._patience_s)
        with self._database.begin() as connection:
            num_forgotten = webhook_attempts.forget(connection, age_s=self._age_s)
        self._metrics.webhooks.labels(outcome="dead").inc(num_given_up)
        return 0.0 if MAX_ENDED in (num_given_up, num_forgotten) else self._pause_s
