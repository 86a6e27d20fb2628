"""The stream of requests that no row can hold: capped, for people to read. Knows no job."""

from __future__ import annotations

import json

import structlog
from redis import Redis

from shardline.keys import INTAKE_DEAD, INTAKE_DEAD_MAX

log = structlog.get_logger(__name__)

MAX_REQUEST_CHARS = 65_536


def bury(redis: Redis, *, entry: str, request: str, reason: dict[str, str] | None) -> None:
    """Keep it with the reason. May raise RedisError."""
    log.warning("request refused", entry=entry, reason=reason)
    redis.xadd(
        INTAKE_DEAD,
        {"entry": entry, "request": request[:MAX_REQUEST_CHARS], "reason": json.dumps(reason)},
        maxlen=INTAKE_DEAD_MAX,
        approximate=True,
    )
