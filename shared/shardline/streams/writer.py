"""The head's side of the streams: many jobs' deltas in one round trip. Keeps nothing; knows no reader."""

from __future__ import annotations

import time
from collections.abc import Sequence
from uuid import UUID

import redis
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.retry import Retry
from redis.typing import EncodableT, FieldT

from shardline.keys import STREAM_TTL_S, job_stream
from shardline.wire import DELTA_FIELD, Delta, encode_delta

MAX_ENTRIES = 16_384
"""Of one stream, about: a reader that is further behind than that goes on from Postgres."""

EXPIRY_EVERY_TOKENS = 256
MAX_KNOWN = 10_000
TIMEOUT_S = 1.0
PAUSE_S = 0.5
"""After a failure nothing is tried for so long: a head makes hundreds of deltas in that time."""


class DeltaWriter:
    """One connection of one thread. `write` never blocks for long, and what it could not write is dropped."""

    def __init__(self, redis_url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self.num_dropped = 0
        """Deltas that no stream has."""
        self._paused_until_s = 0.0
        self._known: set[UUID] = set()
        """Their streams expire."""
        self._redis = redis.Redis.from_url(
            redis_url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            # Once more at once, for a connection that died while idle. A delta written twice is read once.
            retry=Retry(NoBackoff(), 1),
        )

    def write(self, batch: Sequence[tuple[UUID, Delta]]) -> None:
        """Append each delta to its job's stream. Raises redis.RedisError: this batch is then forgotten, and those that
        follow soon are too, without an error for each."""
        if not batch:
            return
        if time.monotonic() < self._paused_until_s:
            self.num_dropped += len(batch)
            return
        try:
            self._append(batch)
        except redis.RedisError:
            self.num_dropped += len(batch)
            self._paused_until_s = time.monotonic() + PAUSE_S
            # The server may come back empty.
            self._known.clear()
            raise

    def close(self) -> None:
        """Give the connection back."""
        self._redis.close()

    def _append(self, batch: Sequence[tuple[UUID, Delta]]) -> None:
        opening = {job_id for job_id, delta in batch if self._opens(job_id, delta)}
        known = [(job_id, delta) for job_id, delta in batch if job_id not in opening]
        lost = self._extend(known)
        self._open([(job_id, delta) for job_id, delta in batch if job_id in opening] + lost)

    def _opens(self, job_id: UUID, delta: Delta) -> bool:
        """At this writer's first entry, now and then, and at the last one: a time to live costs as much as an entry."""
        if delta.state is not None:
            self._known.discard(job_id)
            return True
        if job_id in self._known and delta.start % EXPIRY_EVERY_TOKENS:
            return False
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known.add(job_id)
        return True

    def _open(self, batch: Sequence[tuple[UUID, Delta]]) -> None:
        """At once with its time to live: whatever dies in between, no stream is left that never expires."""
        if not batch:
            return
        pipeline = self._redis.pipeline(transaction=True)
        for job_id, delta in batch:
            _add(pipeline, job_id, delta)
        for job_id in {job_id for job_id, _ in batch}:
            pipeline.expire(job_stream(job_id), STREAM_TTL_S)
        pipeline.execute()

    def _extend(self, batch: Sequence[tuple[UUID, Delta]]) -> list[tuple[UUID, Delta]]:
        """Only streams that are there. Returns what found none: the server lost them, and came back."""
        if not batch:
            return []
        pipeline = self._redis.pipeline(transaction=False)
        for job_id, delta in batch:
            _add(pipeline, job_id, delta, to_existing=True)
        return [entry for entry, added in zip(batch, pipeline.execute(), strict=True) if added is None]


def _add(pipeline: Pipeline, job_id: UUID, delta: Delta, *, to_existing: bool = False) -> None:
    maxlen = MAX_ENTRIES if delta.start >= MAX_ENTRIES else None
    fields: dict[FieldT, EncodableT] = {DELTA_FIELD: encode_delta(delta)}
    pipeline.xadd(job_stream(job_id), fields, maxlen=maxlen, approximate=True, nomkstream=to_existing)
