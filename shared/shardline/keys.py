"""Every Redis key, explained once. Redis may lose any of them at any moment; none of them is truth."""

from __future__ import annotations

from uuid import UUID

PREFIX = "shardline:"

INTAKE = f"{PREFIX}intake"
"""Stream: requests from any language, one JSON document in field `request`. Acked after COMMIT."""

INTAKE_GROUP = "relays"
"""The consumer group of every relay on INTAKE."""

INTAKE_DEAD = f"{PREFIX}intake:dead"
"""Stream, capped: requests that can never become a row, with the reason. Fields `request`, `reason`, `entry`."""

OUTBOX_MARK = f"{PREFIX}outbox:mark"
"""String: set by relays. A missing mark says that Redis lost its messages: the window is sent again at once."""

RELAY_UNACKED = f"{PREFIX}relay:unacked"
"""Hash, with `_index` and `_mutex` beside it: Celery messages that relays took and have not acknowledged, kept apart
from those of heads because they come back sooner."""

INTAKE_DEAD_MAX = 10_000
STREAM_TTL_S = 3_600
REGISTRY_TTL_S = 5


def job_stream(job_id: UUID | str) -> str:
    """Stream: a job's deltas (wire.Delta in field `d`), expires STREAM_TTL_S after the last write."""
    return f"{PREFIX}job:{job_id}"


def stage_entry(incarnation: str) -> str:
    """String: one live stage's address card (JSON), expires after REGISTRY_TTL_S unless renewed. A missing key never
    means death."""
    return f"{PREFIX}stage:{incarnation}"


STAGE_ENTRIES = f"{PREFIX}stage:*"
