"""Celery messages that come twice, in another order, long after their time, or for nobody."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID, uuid4

import msgspec
import psycopg
import redis
from celery import Celery

from shardline.base.config import Settings
from shardline.contract.queues import GENERATE_TASK, celery_settings, generate_queue
from tests.chaos.faults.fault import Fault, Simple, hold
from tests.chaos.faults.redis_faults import client
from tests.chaos.load.requests import MODEL
from tests.chaos.load.target import Target

OPEN = "SELECT id FROM jobs WHERE state IN ('queued', 'running') ORDER BY random() LIMIT 500"
ENDED = "SELECT id FROM jobs WHERE finished_at IS NOT NULL ORDER BY random() LIMIT 50"

AGE_LEASES = 2.0
KEPT_MAX = 500


def duplicate(target: Target, rng: random.Random) -> None:
    """Many open jobs' messages again, twice, in random order; not all, a bulk load has tens of
    thousands."""
    ids = 2 * _ids(target, OPEN)
    rng.shuffle(ids)
    _send(target, ids)


def old(target: Target, rng: random.Random) -> None:
    """Messages of jobs that ended long ago, as a broker delivers them again."""
    _send(target, _ids(target, ENDED))


def for_nobody(target: Target, rng: random.Random) -> None:
    """Messages of jobs that never were."""
    _send(target, [uuid4() for _ in range(20)])


@dataclass(slots=True)
class Late:
    """What the broker held once, byte for byte with its tags and headers, comes again when its jobs
    have long ended."""

    _kept: list[bytes | str] = field(default_factory=list)

    def inject(self, target: Target, rng: random.Random) -> None:
        """Everything that was ever kept, in any order; what is there now is kept for the next
        time."""
        with client(target) as connection:
            if not self._kept:
                self._kept += _held(connection)
                hold(AGE_LEASES * target.times.lease_s)
            late = rng.sample(self._kept, len(self._kept))
            if late:
                connection.lpush(generate_queue(MODEL), *late)
            self._kept = (self._kept + _held(connection))[:KEPT_MAX]


def _held(connection: redis.Redis) -> list[bytes | str]:
    """Messages that wait, and those that heads have taken: kombu keeps each as [message, exchange,
    key]."""
    waiting = [
        message
        for key in connection.scan_iter(f"{generate_queue(MODEL)}*", _type="list")
        for message in connection.lrange(key, 0, -1)
    ]
    taken: list[bytes | str] = [
        msgspec.json.encode(msgspec.json.decode(value)[0]) for value in connection.hvals("unacked")
    ]
    return [*waiting, *taken]


def _ids(target: Target, query: str) -> list[UUID]:
    with psycopg.connect(target.database_url) as connection:
        return [row[0] for row in connection.execute(query)]


def _send(target: Target, ids: Sequence[UUID]) -> None:
    app = Celery("stranger", set_as_current=False)
    app.conf.update(celery_settings(Settings(redis_url=target.redis_url)))
    with app.connection_for_write() as connection:
        for job_id in ids:
            app.send_task(
                GENERATE_TASK,
                args=[str(job_id)],
                task_id=str(job_id),
                queue=generate_queue(MODEL),
                connection=connection,
                retry=False,
            )


FAULTS: tuple[Fault[Target], ...] = (
    Simple(kind="messages: duplicate and reordered", inject=duplicate),
    Simple(kind="messages: of ended jobs", inject=old),
    Simple(kind="messages: minutes old", inject=Late().inject),
    Simple(kind="messages: of no job", inject=for_nobody),
)
