"""A steady mixed load through all doors, with readers that leave and come back. Knows no fault and no invariant."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import psycopg

from shardline.client import Client
from tests.faults.doors import AWAY, DOORS, Door
from tests.faults.journal import Asked, Journal
from tests.faults.reader import Reader
from tests.faults.requests import NUM_REQUESTS, request
from tests.faults.target import Target

OPEN_PER_DOOR = 5
AGAIN_S = 5.0
"""A request without a row is sent again under the same id so often."""

LOOK_S = 0.2
NUM_READERS = 5
READ_DOORS = ("http", "celery")
STREAM_DOOR = "redis"
UNDISTURBED_S = 240.0
JOIN_S = 60.0

ROWS = "SELECT id, extract(epoch FROM finished_at)::float8 FROM jobs WHERE id = ANY(%s)"


def undisturbed(world: Target, *, exact: bool = True) -> list[tuple[int, ...]] | None:
    """The tokens of every request of the set while nobody dies; None where a resume may give others."""
    ids = {number: uuid4() for number in range(NUM_REQUESTS)}
    for number, job_id in ids.items():
        world.journal.ask(Asked(id=job_id, number=number, door="calm", promised=True))
    with Client(database_url=world.urls["database"], redis_url=world.urls["redis"]) as client:
        client.submit_many([{**request(number), "id": job_id} for number, job_id in ids.items()])
        jobs = client.wait(list(ids.values()), timeout_s=UNDISTURBED_S)
    tokens = []
    for job in jobs:
        assert job.result is not None
        assert job.result.exact or not exact, "without exact rows a changed token proves nothing: no kernel?"
        tokens.append(tuple(job.result.token_ids))
    return tokens if exact else None


class Load:
    """Threads: one for each door, a few readers, and a follower that asks Postgres what has ended."""

    def __init__(self, world: Target, *, redis_lasts: bool = False) -> None:
        self._journal = world.journal
        self._database_url = world.database_url
        self._stopping = threading.Event()
        self._drained = threading.Event()
        numbers = itertools.cycle(range(NUM_REQUESTS))
        urls = dict(world.urls)
        workers: dict[str, Callable[[], None]] = {"follower": self._follow}
        for name, door in DOORS.items():
            workers[name] = _Producer(
                name=name,
                door=door(urls),
                journal=self._journal,
                numbers=numbers,
                stopping=self._stopping,
                drained=self._drained,
                lasts=redis_lasts and name == STREAM_DOOR,
            ).run
        for index in range(NUM_READERS):
            reader = Reader(urls, self._journal, random.Random(index), self._drained)
            workers[f"reader {index}"] = partial(self._read, reader)
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for name, run in workers.items()]
        self._watched: set[UUID] = set()
        self._watching = threading.Lock()

    def start(self) -> None:
        """From now on."""
        for thread in self._threads:
            thread.start()

    def drain(self, timeout_s: float) -> bool:
        """Ask for nothing new; whether all that was asked for ends in time. What has no row yet is still sent again."""
        self._stopping.set()
        return self._journal.wait_until_quiet(timeout_s)

    def stop(self) -> None:
        """Threads end; a reader may still want its last event."""
        self._stopping.set()
        self._drained.set()
        for thread in self._threads:
            thread.join(JOIN_S)

    def dead(self) -> list[str]:
        """Threads that ended though nobody asked: the load was not what it should be."""
        return [thread.name for thread in self._threads if not thread.is_alive()]

    def _follow(self) -> None:
        while not self._drained.wait(LOOK_S):
            try:
                with psycopg.connect(self._database_url, autocommit=True, connect_timeout=2) as connection:
                    while not self._drained.wait(LOOK_S):
                        self._look(connection)
            except psycopg.Error:
                continue

    def _look(self, connection: psycopg.Connection[Any]) -> None:
        ids = [each.id for each in self._journal.open()]
        rows = connection.execute(ROWS, (ids,)).fetchall()
        self._journal.has_rows([row[0] for row in rows])
        self._journal.ended([(row[0], row[1]) for row in rows if row[1] is not None])

    def _read(self, reader: Reader) -> None:
        while not self._drained.wait(LOOK_S):
            job_id = self._next_to_watch()
            if job_id is not None:
                reader.read(job_id)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Producer:
    """One door's producer: keeps a bounded number of jobs open, and repeats what may have been lost on its way."""

    name: str
    door: Door
    journal: Journal
    numbers: Iterator[int]
    stopping: threading.Event
    drained: threading.Event
    lasts: bool
    """What the door has taken cannot be lost: nothing is sent twice."""

    def run(self) -> None:
        """Until the load has drained."""
        while not self.drained.wait(LOOK_S):
            waiting = self.journal.open(self.name)
            for asked in waiting:
                is_held = self.lasts and asked.promised
                if not asked.has_row and not is_held and time.monotonic() - asked.asked_s > AGAIN_S:
                    self._send(asked)
            if len(waiting) < OPEN_PER_DOOR and not self.stopping.is_set():
                asked = Asked(id=uuid4(), number=next(self.numbers), door=self.name)
                self._send(self.journal.ask(asked))

    def _send(self, asked: Asked) -> None:
        asked.asked_s = time.monotonic()
        asked.num_sends += 1
        with suppress(*AWAY):
            asked.promised |= self.door(asked.id, request(asked.number)) or self.lasts
