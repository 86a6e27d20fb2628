"""A relay's settings from the environment. Knows no server."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from shardline.contract.keys import RELAY_UNACKED
from shardline.contract.queues import celery_settings
from shardline.contract.webhooks.webhook_settings import WebhookSettings


class RelaySettings(WebhookSettings):
    """Run as many relays as you like; they share the work."""

    concurrency: int = Field(
        4, ge=1, le=64, description="requests of the Celery door that this relay stores at a time"
    )
    intake_batch: int = Field(
        256, ge=1, le=2000, description="entries of the intake stream in one transaction"
    )

    retention_days: float = Field(
        90.0, ge=0, le=36_500, description="days after which ended jobs are deleted; 0 keeps them"
    )
    audit_days: float = Field(
        365.0,
        ge=0,
        le=36_500,
        description="days after which entries of the audit log are deleted; 0 keeps them",
    )

    energy_price: str | None = Field(
        None,
        repr=False,
        description="money for a kWh: a number, or a file or URL of a series "
        "(CSV time,value or JSON)",
    )
    energy_carbon: str | None = Field(
        None, repr=False, description="grams of CO2 equivalent for a kWh, given in the same way"
    )

    webhook_timeout_s: float = Field(
        10.0, gt=0, le=60, description="time for a webhook's endpoint to answer"
    )
    webhook_max_attempts: int = Field(
        12, ge=1, le=20, description="attempts at a webhook, over about 30 h; then it is dead"
    )
    webhook_patience_days: float = Field(
        3.0, gt=0, le=365, description="days of failures after which an endpoint is disabled"
    )
    webhook_keep_days: float = Field(
        7.0, gt=0, le=36_500, description="days after which ended webhooks are deleted"
    )
    ended_stream_max: int = Field(
        0,
        ge=0,
        le=10_000_000,
        description="entries of the Redis stream `shardline:ended`, ids of ended jobs; "
        "0: no stream",
    )

    def celery(self) -> dict[str, Any]:
        """Celery's configuration of a relay's worker.

        Its unacknowledged messages are kept apart from those of heads and come back soon: a request
        that a dead relay had taken but not committed exists nowhere else.
        """
        shared = celery_settings(self)
        apart = {
            "unacked_key": RELAY_UNACKED,
            "unacked_index_key": f"{RELAY_UNACKED}_index",
            "unacked_mutex_key": f"{RELAY_UNACKED}_mutex",
            "visibility_timeout": max(5.0, 3 * self.times.lease_s),
            # kombu looks for them every 10 s, but only the tenth look counts.
            "unacked_restore_throttle": 1,
            # Of tenants' queues each has its turn.
            "queue_order_strategy": "round_robin",
        }
        return {
            **shared,
            "worker_pool": "threads",
            "worker_concurrency": self.concurrency,
            "broker_transport_options": {**shared["broker_transport_options"], **apart},
        }
