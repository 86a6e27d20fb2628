"""The stream of requests that no row can hold: bounded in bytes, for people to read. Knows no
job."""

from __future__ import annotations

import json

import structlog
from redis import Redis
from redis.exceptions import OutOfMemoryError
from redis.typing import EncodableT, FieldT

from shardline.contract.keys import INTAKE_DEAD, INTAKE_DEAD_MAX_BYTES, INTAKE_DEAD_TTL_S
from shardline.store.connection.encoding import storable

log = structlog.get_logger(__name__)

MAX_REQUEST_CHARS = 65_536


def record_reject(redis: Redis, *, entry: str, request: str, reason: dict[str, str] | None) -> None:
    """Keep a request with its reason, if Redis has room: a full Redis must not block later
    requests. Raises other RedisErrors."""
    entry, request = storable(entry), storable(request[:MAX_REQUEST_CHARS])
    log.warning("request rejected", entry=entry, reason=reason)
    fields: dict[FieldT, EncodableT] = {
        "entry": entry,
        "request": request,
        "reason": json.dumps(reason),
    }
    try:
        with redis.pipeline(transaction=True) as pipeline:
            pipeline.xadd(INTAKE_DEAD, fields)
            pipeline.expire(INTAKE_DEAD, INTAKE_DEAD_TTL_S)
            pipeline.xlen(INTAKE_DEAD)
            pipeline.memory_usage(INTAKE_DEAD, samples=0)
            *_, num_entries, num_bytes = pipeline.execute()
    except OutOfMemoryError:
        log.warning("redis full: rejected request not kept", entry=entry)
        return
    if num_bytes > INTAKE_DEAD_MAX_BYTES:
        redis.xtrim(INTAKE_DEAD, maxlen=num_entries // 2, approximate=False)
