"""The ids of ended jobs as a stream in Redis, for those who listen inside. Never truth: what ends
while no relay leads, or Redis is away for long, is missing."""

from __future__ import annotations

from collections import deque

import structlog
from redis import Redis

from services.relay.loop import Loop, LoopContext
from shardline.contract.keys import ENDED, ENDED_TTL_S
from shardline.contract.tables import DONE_CHANNEL
from shardline.store.connection.notify import listening

log = structlog.get_logger(__name__)

LOCK = 7_305_793_427
"""Advisory lock of a listening session: one relay writes, so that each id comes once."""

NEVER_S = 86_400.0
"""Between two turns without anything to do."""

MAX_WAITING = 10_000
"""Ids that wait for Redis in memory; the oldest go first."""

MAX_AT_ONCE = 1_000
"""Ids in one round trip."""


class EndedStream(Loop):
    """Keeps one separate connection, and none where `max_entries` is 0."""

    def __init__(
        self, context: LoopContext, *, database_url: str, redis: Redis, max_entries: int
    ) -> None:
        super().__init__("ended-stream", context.metrics.errors)
        self._database_url = database_url
        self._redis = redis
        self._max_entries = max_entries
        self._poll_s = context.times.poll_s
        self._waiting: deque[str] = deque(maxlen=MAX_WAITING)

    def turn(self) -> float:
        """Listen until stopped, or until a connection is lost."""
        if not self._max_entries:
            return NEVER_S
        self._write()
        with listening(self._database_url, DONE_CHANNEL) as bell:
            while not self._stopped.is_set():
                words = bell.hear(self._poll_s) or ()
                if bell.leads(LOCK):
                    # An earlier release rings without words.
                    self._waiting.extend(name for word in words for name in word.split(",") if name)
                self._write()
        return 0.0

    def _write(self) -> None:
        while self._waiting:
            names = [self._waiting[place] for place in range(min(len(self._waiting), MAX_AT_ONCE))]
            with self._redis.pipeline(transaction=False) as pipeline:
                for name in names:
                    pipeline.xadd(ENDED, {"id": name}, maxlen=self._max_entries, approximate=True)
                pipeline.expire(ENDED, ENDED_TTL_S)
                pipeline.execute()
            for _ in names:
                self._waiting.popleft()
