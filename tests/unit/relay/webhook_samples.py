"""Attempts at webhooks that no row has."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

from shardline.contract.webhooks.event import new_secret
from shardline_server.store.webhook_attempts import WebhookAttempt

ANY_PORT = ("127.0.0.1", 0)
DELIVERY_ID = UUID(int=7)
JOB_ID = UUID(int=9)


def attempt_at(
    url: str, *, event_type: str = "job.succeeded", secrets: tuple[str, ...] = ()
) -> WebhookAttempt:
    """The first one at this URL."""
    return WebhookAttempt(
        id=DELIVERY_ID,
        endpoint_id=UUID(int=1),
        event_type=event_type,
        object_id=JOB_ID,
        created_at=datetime.now(UTC),
        is_test=False,
        attempt=1,
        url=url,
        secrets=secrets or (new_secret(),),
    )
