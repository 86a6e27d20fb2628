"""The publisher: the head's one thread that writes streams to Redis. Nothing waits for it.

What it drops while Redis is unreachable is in Postgres: streams are never truth.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol
from uuid import UUID

import structlog
from redis.exceptions import RedisError

from shardline.contract.wire import Delta
from shardline_server.failpoints import Point, failpoint

log = structlog.get_logger(__name__)

MAX_WAITING = 20_000
"""Deltas. While Redis is unreachable or slow, readers fall back to Postgres."""


class DeltaSink(Protocol):
    """Takes deltas. Used by one thread."""

    def write(self, batch: Sequence[tuple[UUID, Delta]]) -> None:
        """Append each delta to its job's stream. Raises redis.RedisError; what could not be written
        is dropped."""


class DeltaPublisher(threading.Thread):
    """Writes what waits in one round trip."""

    def __init__(self, sink: DeltaSink) -> None:
        super().__init__(name="publisher", daemon=True)
        self._sink = sink
        self._deltas: deque[tuple[UUID, Delta]] = deque(maxlen=MAX_WAITING)
        self._woken = threading.Event()
        self._running = True

    def delta(self, job_id: UUID, delta: Delta) -> None:
        """Sends it to the readers of this job's stream, soon. Any thread; calls for one job keep
        their order."""
        self._deltas.append((job_id, delta))
        self._woken.set()

    def deltas(self, job_id: UUID, deltas: Iterable[Delta]) -> None:
        """Several, in order."""
        for delta in deltas:
            self.delta(job_id, delta)

    def stop(self) -> None:
        """End the thread after what waits is written, or given up."""
        self._running = False
        self._woken.set()

    def run(self) -> None:
        """Publishes until stopped. Everything that waits travels in one round trip."""
        while self._running or self._deltas:
            self._woken.wait(1.0)
            self._woken.clear()
            try:
                self._write()
            except RedisError as error:
                log.warning("redis unreachable: stream entries dropped", error=str(error)[:200])
            except Exception:  # one job's delta or result must not end those of all
                log.exception("stream entries or results dropped")

    def _write(self) -> None:
        batch = [self._deltas.popleft() for _ in range(len(self._deltas))]
        if batch:
            self._sink.write(batch)
            if any(delta.ids for _, delta in batch):
                failpoint(Point.AFTER_EMIT)
