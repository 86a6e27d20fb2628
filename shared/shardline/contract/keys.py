"""Every Redis key, explained once. Redis may lose any of them at any moment; none of them is truth.

What may be dropped expires: a full Redis (`volatile-lru`) drops that, the longest unused first, and
keeps queues.
"""

from __future__ import annotations

from uuid import UUID

PREFIX = "shardline:"

INTAKE = f"{PREFIX}intake"
"""Stream: requests from any language, one JSON document in field `request`. Acked after COMMIT."""

INTAKE_GROUP = "relays"
"""The consumer group of every relay on INTAKE."""

DOOR = f"{PREFIX}door:"
"""What keys of tenants with a user of Redis begin with: see `tenant_door`."""

INTAKE_DEAD = f"{PREFIX}intake:dead"
"""Stream, for people: requests that can never become a row, with the reason. Fields `request`,
`reason`, `entry`. Expires INTAKE_DEAD_TTL_S after the last one; the oldest go when it has more than
INTAKE_DEAD_MAX_BYTES."""

ENDED = f"{PREFIX}ended"
"""Stream, for anybody: ended jobs, the id in field `id`, by the relay that leads. It keeps
SHARDLINE_ENDED_STREAM_MAX entries. Expires ENDED_TTL_S after the last one."""

OUTBOX_MARK = f"{PREFIX}outbox:mark"
"""String: set by relays. A missing mark means that Redis lost its messages: the window is sent
again at once."""

RELAY_UNACKED = f"{PREFIX}relay:unacked"
"""Hash, with `_index` and `_mutex` next to it: Celery messages that relays took and have not
acknowledged, kept apart from those of heads because they come back sooner."""

TASK_SENDS_TTL_S = 86_400
INTAKE_DEAD_MAX_BYTES = 4 << 20
INTAKE_DEAD_TTL_S = 7 * 86_400
ENDED_TTL_S = 86_400
STREAM_TTL_S = 600
STREAM_ENDED_TTL_S = 60
STREAM_MAX_BYTES = 256 << 10
REGISTRY_TTL_S = 5
REGISTRY_RENEWALS = 5
"""Within REGISTRY_TTL_S."""
MAX_CARDS = 4096
"""Cards that a head sees in one look."""
LOOKS_PER_HEARTBEAT = 10
"""Of a head that waits for stages."""
STAGES_TTL_S = 60


def job_stream(job_id: UUID | str) -> str:
    """Stream: a job's last deltas (wire.Delta in field `d`), about STREAM_MAX_BYTES of them at
    most. Expires STREAM_TTL_S after its head fell silent, STREAM_ENDED_TTL_S after the end:
    Postgres has all of it."""
    return f"{PREFIX}job:{job_id}"


def stage_entry(incarnation: str) -> str:
    """String: one live stage's address card (JSON), expires after REGISTRY_TTL_S unless renewed. A
    missing key never means death."""
    return f"{PREFIX}stage:{incarnation}"


STAGES = f"{PREFIX}stages"
"""Set: incarnations that have put up a card; a reader takes out those without a card. Expires after
STAGES_TTL_S without any."""


def task_sends(task_id: str) -> str:
    """Hash: ids of the messages that a relay sent at the end of a Celery task, so that another one,
    after a crash, does not send them again. Expires TASK_SENDS_TTL_S after the first one."""
    return f"{PREFIX}task:{task_id}:sends"
