"""Celery messages that come twice, in another order, long after their time, or for nobody."""

from __future__ import annotations

import random
from collections.abc import Sequence
from uuid import UUID, uuid4

import psycopg
from celery import Celery

from shardline.config import Settings
from shardline.queues import GENERATE_TASK, celery_settings, generate_queue
from tests.faults.fault import Fault, Simple
from tests.faults.requests import MODEL
from tests.faults.world import World

OPEN = "SELECT id FROM jobs WHERE state IN ('queued', 'running')"
ENDED = "SELECT id FROM jobs WHERE finished_at IS NOT NULL ORDER BY random() LIMIT 50"


def duplicate(world: World, rng: random.Random) -> None:
    """Every open job's message again, twice, in random order."""
    ids = 2 * _ids(world, OPEN)
    rng.shuffle(ids)
    _send(world, ids)


def old(world: World, rng: random.Random) -> None:
    """Messages of jobs that ended long ago, as a broker delivers them again."""
    _send(world, _ids(world, ENDED))


def for_nobody(world: World, rng: random.Random) -> None:
    """Messages of jobs that never were."""
    _send(world, [uuid4() for _ in range(20)])


def _ids(world: World, query: str) -> list[UUID]:
    with psycopg.connect(world.database_url) as connection:
        return [row[0] for row in connection.execute(query)]


def _send(world: World, ids: Sequence[UUID]) -> None:
    app = Celery("stranger", set_as_current=False)
    app.conf.update(celery_settings(Settings(redis_url=world.redis_url)))
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


FAULTS: tuple[Fault, ...] = (
    Simple(kind="messages: duplicate and reordered", inject=duplicate),
    Simple(kind="messages: of ended jobs", inject=old),
    Simple(kind="messages: of no job", inject=for_nobody),
)
