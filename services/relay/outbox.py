"""The outbox: sends a Celery message for each row that is due, after COMMIT. No transaction spans a
Redis call."""

from __future__ import annotations

from collections.abc import Sequence

import structlog
from celery import Celery
from redis import Redis

from services.relay.loop import REDIS_ERRORS, Loop, LoopContext
from shardline.base.clock import monotonic_s
from shardline.base.trace_context import is_traceparent
from shardline.contract.keys import OUTBOX_MARK
from shardline.contract.queues import GENERATE_TASK, generate_queue
from shardline_server.failpoints import Point, failpoint
from shardline_server.store import outbox, paused_jobs
from shardline_server.store.outbox import Send
from shardline_server.store.turns import take_turn
from shardline_server.store.windows import MAX_BATCH

log = structlog.get_logger(__name__)

BUSY_TURNS = 50
"""Turns after a send that come ten times as often, because heads free places in the window as they
claim."""


class Outbox(Loop):
    """`publisher` is a Celery app with connections that time out soon."""

    def __init__(self, context: LoopContext, *, publisher: Celery, redis: Redis) -> None:
        super().__init__("outbox", context.metrics.errors)
        self._database = context.database
        self._publisher = publisher
        self._redis = redis
        self._times = context.times
        self._metrics = context.metrics
        self._spans = context.spans
        self._busy_until_s = 0.0
        self._next_mark_s = 0.0

    def turn(self) -> float:
        """Send one batch."""
        self._notice_empty_redis()
        with self._database.begin() as connection:
            turn = take_turn(connection)
            num_moved = paused_jobs.settle(connection, turn)
            sends = outbox.stamp_due(connection, turn, resend_s=self._times.resend_s)
        if sends:
            failpoint(Point.STAMPED)
        self._publish(sends)
        if sends:
            self._busy_until_s = monotonic_s() + BUSY_TURNS * self._times.poll_s / 10
        if num_moved or len(sends) >= MAX_BATCH:
            return 0.0
        return self._times.poll_s / 10 if monotonic_s() < self._busy_until_s else self._times.poll_s

    def _notice_empty_redis(self) -> None:
        """Send the whole window again if the mark is missing: Redis has lost its messages too.
        Looks once per poll, and at once after a failure."""
        now_s = monotonic_s()
        if now_s < self._next_mark_s:
            return
        if self._redis.exists(OUTBOX_MARK):
            self._next_mark_s = now_s + self._times.poll_s
            return
        num_lost = 0
        while num := self._unstamp():
            num_lost += num
        self._redis.set(OUTBOX_MARK, "1")
        if num_lost:
            log.warning("Redis is empty: sending the window again", jobs=num_lost)

    def _unstamp(self) -> int:
        with self._database.begin() as connection:
            return outbox.unstamp_sent(connection)

    def _publish(self, sends: Sequence[Send]) -> None:
        num_sent = 0
        try:
            if sends:
                with self._publisher.producer_pool.acquire(
                    block=True, timeout=self._times.poll_s
                ) as producer:
                    for send in sends:
                        try:
                            self._send(send, producer)
                        except REDIS_ERRORS:
                            raise
                        # those behind it are sent; it is tried again as a lost message is
                        except Exception:
                            log.exception("a job's message cannot be made", job_id=str(send.job_id))
                        num_sent += 1
        except REDIS_ERRORS:
            self._next_mark_s = 0.0
            with self._database.begin() as connection:
                outbox.unstamp(connection, [send.job_id for send in sends[num_sent:]])
            raise

    def _send(self, send: Send, producer: object) -> None:
        began_s = monotonic_s()
        self._publisher.send_task(
            GENERATE_TASK,
            args=[str(send.job_id)],
            task_id=str(send.job_id),
            queue=generate_queue(send.model),
            priority=send.priority,
            headers={"traceparent": send.traceparent} if is_traceparent(send.traceparent) else None,
            producer=producer,
            retry=False,
        )
        self._metrics.sent.labels(model=send.model).inc()
        if send.num_sends > 1:
            self._metrics.resent.inc()
        self._spans.published(send, began_s)
