"""One stream followed by one thread: for the synchronous client. Knows no order and no Postgres."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import redis
from redis.exceptions import RedisError

from shardline.base.redis import redis_client
from shardline.contract.keys import job_stream
from shardline.contract.wire import Delta
from shardline.streams.reader import MAX_ENTRIES_PER_READ, TIMEOUT_S, deltas_of


class SyncDeltaReader:
    """A job's stream from its beginning. While Redis is unreachable it has nothing, and `is_away`
    is true."""

    def __init__(self, client: redis.Redis, job_id: UUID) -> None:
        self.is_away = False
        self._redis = client
        self._key = job_stream(job_id)
        self._last_id: bytes | str = "0"

    @staticmethod
    def connect(redis_url: str) -> redis.Redis:
        """Returns a connection with reads that may block for up to TIMEOUT_S."""
        return redis_client(redis_url, timeout_s=TIMEOUT_S, protocol=2)

    def read(self, block_s: float) -> list[Delta]:
        """The deltas that came, at the latest after `block_s`."""
        block_ms = max(1, int(min(block_s, TIMEOUT_S / 2) * 1_000))
        try:
            reply: Any = self._redis.xread(
                {self._key: self._last_id}, count=MAX_ENTRIES_PER_READ, block=block_ms
            )
        except (RedisError, OSError):
            self.is_away = True
            self._last_id = "0"
            return []
        self.is_away = False
        entries = reply[0][1] if reply else []
        if entries:
            self._last_id = entries[-1][0]
        return list(deltas_of(entries))
