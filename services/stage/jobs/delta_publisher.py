"""The publisher: the head's one thread that writes streams to Redis. Nothing waits for it.

What it drops while Redis is unreachable is in Postgres: streams are never truth.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Protocol
from uuid import UUID

import structlog
from redis.exceptions import RedisError

from shardline.contract.wire import Delta
from shardline_server.failpoints import Point, failpoint
from shardline_server.host.duty_cycle import DutyCycle

log = structlog.get_logger(__name__)

MAX_WAITING = 20_000
"""Deltas. While Redis is unreachable or slow, readers fall back to Postgres."""
MAX_JOINED = 64
"""Tokens of one delta that several became."""
SHARE = 0.2
"""Of the interpreter, while the engine waits for it."""
LONGEST_REST_S = 0.05


class DeltaSink(Protocol):
    """Takes deltas. Used by one thread."""

    def write(self, batch: Sequence[tuple[UUID, Delta]]) -> None:
        """Append each delta to its job's stream. Raises redis.RedisError; what could not be written
        is dropped."""


class DeltaPublisher(threading.Thread):
    """Writes what waits in one round trip, a job's deltas as one where they follow each other."""

    def __init__(self, sink: DeltaSink) -> None:
        super().__init__(name="publisher", daemon=True)
        self._sink = sink
        self._deltas: deque[tuple[UUID, Delta]] = deque(maxlen=MAX_WAITING)
        self._woken = threading.Event()
        self._duty = DutyCycle(share=SHARE, longest_rest_s=LONGEST_REST_S)
        self._running = True

    def delta(self, job_id: UUID, delta: Delta, *, is_urgent: bool = False) -> None:
        """Sends it to the readers of this job's stream, soon, or at once. Any thread; calls for one
        job keep their order."""
        self._deltas.append((job_id, delta))
        if is_urgent:
            self._duty.hasten()
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
                with self._duty:
                    self._write()
            except RedisError as error:
                log.warning("redis unreachable: stream entries dropped", error=str(error)[:200])
            except Exception:  # one job's delta or result must not end those of all
                log.exception("stream entries or results dropped")

    def _write(self) -> None:
        batch = join([self._deltas.popleft() for _ in range(len(self._deltas))])
        if batch:
            self._sink.write(batch)
            if any(delta.ids for _, delta in batch):
                failpoint(Point.AFTER_EMIT)


def join(batch: Sequence[tuple[UUID, Delta]]) -> list[tuple[UUID, Delta]]:
    """Returns the same tokens in fewer deltas of at most MAX_JOINED tokens, each job's in order: an
    entry of a stream costs the same for one token as for many."""
    jobs: dict[UUID, list[list[Delta]]] = {}
    for job_id, delta in batch:
        runs = jobs.setdefault(job_id, [])
        if runs and _follows(runs[-1], delta):
            runs[-1].append(delta)
        else:
            runs.append([delta])
    return [(job_id, _joined(run)) for job_id, runs in jobs.items() for run in runs]


def _follows(run: Sequence[Delta], delta: Delta) -> bool:
    """Whether one delta can stand for both. An end stays alone: it is written after its COMMIT."""
    first, last = run[0], run[-1]
    return (
        (last.state, last.finish_reason, last.fence) == (None, None, delta.fence)
        and (delta.state, delta.finish_reason) == (None, None)
        and last.next == delta.start
        and delta.next - first.start <= MAX_JOINED
        and (last.logprobs is None) == (delta.logprobs is None)
    )


def _joined(run: Sequence[Delta]) -> Delta:
    first = run[0]
    if len(run) == 1:
        return first
    return Delta(
        fence=first.fence,
        start=first.start,
        ids=tuple(chain.from_iterable(delta.ids for delta in run)),
        text="".join(delta.text for delta in run),
        logprobs=None
        if first.logprobs is None
        else tuple(chain.from_iterable(delta.logprobs or () for delta in run)),
    )
