"""A steady mixed load through all doors, with readers that leave and come back. Knows no fault and
no invariant."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from uuid import UUID

import psycopg

from tests.chaos.load.batches.sent_batch import SentBatch
from tests.chaos.load.crowd import crowd
from tests.chaos.load.doors import DOORS
from tests.chaos.load.journal import Asked
from tests.chaos.load.producer import LOOK_S, Producer
from tests.chaos.load.reader import Reader
from tests.chaos.load.target import Target
from tests.chaos.load.tenants.ledger import TenantLedger

NUM_READERS = 5
SLOW_READERS = frozenset({3, 4})
"""Of the users' load."""
READ_DOORS = ("http", "celery")
STREAM_DOOR = "redis"
JOIN_S = 60.0
TELL_S = 15.0

ROWS = """
SELECT id, idempotency_key, extract(epoch FROM finished_at)::float8 FROM jobs
WHERE id = ANY(%(ids)s) OR (tenant_id = 'default' AND idempotency_key = ANY(%(keys)s))
"""

Work = Callable[[], None]


class Load:
    """Threads: one for each door, a few readers, in the users' load a crowd, and a follower that
    asks Postgres what has ended."""

    def __init__(
        self, target: Target, *, redis_lasts: bool = False, seed: int = 0, minutes: float = 0.0
    ) -> None:
        self._journal = target.journal
        self._database_url = target.database_url
        self._stopping = threading.Event()
        self._drained = threading.Event()
        workers: dict[str, Work] = {
            "follower": self._follow,
            **self._producers(target, redis_lasts, seed),
        }
        for index in range(NUM_READERS):
            slow = target.workload.is_users and index in SLOW_READERS
            rng = random.Random(index)
            reader = Reader(target.urls, self._journal, rng, self._drained, slow=slow)
            workers[f"reader {index}"] = partial(self._read, reader.read)
        self._crowd = crowd(target, self._stopping, self._drained, seed=seed, minutes=minutes)
        workers |= self._crowd.workers(self._read)
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True) for name, run in workers.items()
        ]
        self._watched: set[UUID] = set()
        self._watching = threading.Lock()

    def _producers(self, target: Target, redis_lasts: bool, seed: int) -> Mapping[str, Work]:
        numbers = itertools.cycle(range(len(target.workload.requests)))
        urls = dict(target.urls)
        return {
            name: Producer(
                name=name,
                door=door(urls),
                journal=self._journal,
                workload=target.workload,
                numbers=numbers,
                stopping=self._stopping,
                drained=self._drained,
                lasts=redis_lasts and name == STREAM_DOOR,
                rng=random.Random(f"{seed} {name}"),
            ).run
            for name, door in DOORS.items()
        }

    def start(self) -> None:
        """From now on."""
        for thread in self._threads:
            thread.start()

    def drain(self, timeout_s: float, say: Callable[[str], None]) -> bool:
        """Ask for nothing new; whether all that was asked for ends in time. What has no row yet is
        still sent again."""
        self._stopping.set()
        until_s = time.monotonic() + timeout_s
        while not self._journal.wait_until_quiet(min(TELL_S, max(0.0, until_s - time.monotonic()))):
            if time.monotonic() >= until_s:
                return False
            waiting = self._journal.open()
            num_rowless = sum(not each.has_row for each in waiting)
            say(f"{len(waiting)} jobs have not ended, {num_rowless} of them without a row")
        return self._crowd.is_done(max(0.0, until_s - time.monotonic()))

    def stop(self) -> None:
        """Threads end; a reader may still want its last event."""
        self._stopping.set()
        self._drained.set()
        for thread in self._threads:
            thread.join(JOIN_S)

    def held(self) -> list[Asked]:
        """Jobs of the load that the journal does not have."""
        return self._crowd.held()

    def batches(self) -> list[SentBatch]:
        """What was sent as batches; their jobs are not in the journal either."""
        return self._crowd.batches()

    def tenants(self) -> TenantLedger:
        """What tenants asked for and were told; their jobs are not in the journal either."""
        return self._crowd.tenants

    def disturbed_s(self) -> list[float]:
        """When Redis may have lost messages of other teams' workers (seconds since 1970)."""
        worker = self._crowd.canvas_worker
        return [] if worker is None else list(worker.disturbed_s)

    def dead(self) -> list[str]:
        """Threads that ended though nobody asked: the load was not what it should be."""
        return [thread.name for thread in self._threads if not thread.is_alive()]

    def _follow(self) -> None:
        while not self._drained.wait(LOOK_S):
            try:
                with psycopg.connect(
                    self._database_url, autocommit=True, connect_timeout=2
                ) as connection:
                    while not self._drained.wait(LOOK_S):
                        self._look(connection)
            except psycopg.Error:
                continue

    def _look(self, connection: psycopg.Connection[Any]) -> None:
        waiting = self._journal.open()
        by_key = {each.key: each for each in waiting if each.key is not None and not each.has_row}
        rows = connection.execute(
            ROWS, {"ids": [each.id for each in waiting], "keys": list(by_key)}
        ).fetchall()
        for job_id, key, _ in rows:
            if key in by_key:
                self._journal.known(by_key[key], job_id)
        self._journal.has_rows([row[0] for row in rows])
        self._journal.ended([(row[0], row[2]) for row in rows if row[2] is not None])

    def _read(self, read: Callable[[UUID], object]) -> None:
        while not self._drained.wait(LOOK_S):
            job_id = self._next_to_watch()
            if job_id is not None:
                read(job_id)

    def _next_to_watch(self) -> UUID | None:
        """The newest job that has a row and no reader."""
        with self._watching:
            candidates = [
                each.id
                for each in self._journal.open()
                if each.door in READ_DOORS and each.has_row and each.id not in self._watched
            ]
            if not candidates:
                return None
            self._watched.add(candidates[-1])
            return candidates[-1]
