"""The head's side of the streams: many jobs' deltas in one round trip. Keeps nothing; knows no
reader."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import redis
from redis.client import Pipeline
from redis.typing import EncodableT, FieldT

from shardline.base.redis import redis_client
from shardline.contract.keys import STREAM_ENDED_TTL_S, STREAM_MAX_BYTES, STREAM_TTL_S, job_stream
from shardline.contract.wire import DELTA_FIELD, Delta, encode_delta
from shardline.streams.reader import NO_STREAM

ENTRY_BYTES = 20
"""What Redis needs for an entry on top of the delta."""

RENEW_S = STREAM_TTL_S / 4
MAX_KNOWN = 10_000
TIMEOUT_S = 1.0
PAUSE_S = 0.5
"""After a failure nothing is tried for so long: a head makes hundreds of deltas in that time."""


@dataclass(slots=True)
class _Stream:
    """One that this writer has begun."""

    key: str
    renew_s: float
    """When its time to live is due again, monotonic."""
    num_entries: int = 0
    num_bytes: int = 0

    def add(self, delta: bytes) -> int:
        """Returns how many entries of its mean size the stream may have: a reader that is further
        behind goes on from Postgres."""
        self.num_entries += 1
        self.num_bytes += len(delta) + ENTRY_BYTES
        return max(1, STREAM_MAX_BYTES * self.num_entries // self.num_bytes)


class DeltaWriter:
    """One connection of one thread. `write` never blocks for long, and what it could not write is
    dropped."""

    def __init__(self, redis_url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self.num_dropped = 0
        """Deltas that no stream has."""
        self._paused_until_s = 0.0
        self._known: dict[UUID, _Stream] = {}
        """They expire."""
        # Once more at once, for a connection that died while idle. A delta written twice is read
        # once.
        self._redis = redis_client(redis_url, timeout_s=timeout_s, num_retries=1)

    def write(self, batch: Sequence[tuple[UUID, Delta]]) -> None:
        """Append each delta to its job's stream. Raises redis.RedisError: this batch is then
        forgotten, and those that follow soon are too, without an error for each."""
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
        """Decides whether to renew: at this writer's first entry, now and then, and at the last
        one: a time to live costs as much as an entry."""
        now_s = time.monotonic()
        stream = self._known.get(job_id)
        if delta.state is None and stream is not None and now_s < stream.renew_s:
            return False
        if stream is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            stream = self._known[job_id] = _Stream(job_stream(job_id), now_s)
        stream.renew_s = now_s + RENEW_S
        return True

    def _open(self, batch: Sequence[tuple[UUID, Delta]]) -> None:
        """Opens streams at once with their time to live: whatever dies in between, no stream is
        left that never expires."""
        if not batch:
            return
        pipeline = self._redis.pipeline(transaction=True)
        for job_id, delta in batch:
            self._add(pipeline, job_id, delta)
        ended = {job_id for job_id, delta in batch if delta.state is not None}
        for job_id in {job_id for job_id, _ in batch}:
            pipeline.expire(
                job_stream(job_id), STREAM_ENDED_TTL_S if job_id in ended else STREAM_TTL_S
            )
        _without_wrong_types(pipeline.execute(raise_on_error=False))
        for job_id in ended:
            self._known.pop(job_id, None)

    def _extend(self, batch: Sequence[tuple[UUID, Delta]]) -> list[tuple[UUID, Delta]]:
        """Only streams that are there. Returns what found none: the server lost them, and came
        back."""
        if not batch:
            return []
        pipeline = self._redis.pipeline(transaction=False)
        for job_id, delta in batch:
            self._add(pipeline, job_id, delta, to_existing=True)
        replies = _without_wrong_types(pipeline.execute(raise_on_error=False))
        return [entry for entry, added in zip(batch, replies, strict=True) if added is None]

    def _add(
        self, pipeline: Pipeline, job_id: UUID, delta: Delta, *, to_existing: bool = False
    ) -> None:
        encoded = encode_delta(delta)
        stream = self._known.get(job_id)
        if stream is None:
            stream = self._known[job_id] = _Stream(job_stream(job_id), 0.0)
        fields: dict[FieldT, EncodableT] = {DELTA_FIELD: encoded}
        pipeline.xadd(
            stream.key,
            fields,
            maxlen=stream.add(encoded),
            approximate=True,
            nomkstream=to_existing,
        )


def _without_wrong_types(replies: list[Any]) -> list[Any]:
    """Returns the replies. A key that is no stream costs only its own job's readers their deltas.
    Raises every other error."""
    for reply in replies:
        if isinstance(reply, redis.RedisError) and not str(reply).startswith(NO_STREAM):
            raise reply
    return replies
