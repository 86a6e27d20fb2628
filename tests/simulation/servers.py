"""Postgres and Redis as processes see them: slow, away now and then, with answers that get lost on
their way back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from redis.exceptions import ConnectionError as RedisAway
from sqlalchemy.exc import OperationalError

from shardline.base.errors import Unavailable
from shardline.contract.wire import Delta, StageCard
from tests.simulation.connection import Connection
from tests.simulation.loom import Loom, elapse
from tests.simulation.rows import Tables

MAX_STATEMENT_S = 0.01
CARD_TTL_S = 15.0


class Away(Exception):
    """What the driver says."""


@dataclass(eq=False, slots=True)
class Postgres:
    """The tables behind a connection. `lost_answers` is how often a COMMIT is done and its answer
    lost."""

    loom: Loom
    tables: Tables
    is_up: bool = True
    lost_answers: float = 0.0
    num_lost_answers: int = 0

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """One transaction. It is done at one moment; the process may be paused or killed before and
        after it."""
        elapse(self.loom.rng.uniform(0.0005, MAX_STATEMENT_S))
        self._check()
        yield Connection(self.tables)
        elapse(self.loom.rng.uniform(0.0005, MAX_STATEMENT_S))
        self._check()
        if self.loom.rng.random() < self.lost_answers:
            self.num_lost_answers += 1
            raise OperationalError("COMMIT", {}, Away("the connection broke"))

    connect = begin

    def execution_options(self, *, isolation_level: str) -> Postgres:
        """A statement that reads is the same in a transaction of its own."""
        assert isolation_level == "AUTOCOMMIT"
        return self

    def restart(self) -> None:
        """Heads get a lease to beat again."""
        self.is_up = True
        self.tables.started_s = self.loom.now_s

    def dispose(self) -> None:
        """Nothing to close."""

    def _check(self) -> None:
        if not self.is_up:
            raise OperationalError("BEGIN", {}, Away("Postgres is away"))


@dataclass(eq=False, slots=True)
class Redis:
    """Messages, streams, cards and the relay's mark: all may be gone at any moment."""

    loom: Loom
    is_up: bool = True
    mark: bool = False
    repeats: float = 0.0
    """How often a message is delivered twice, the second time late."""
    losses: float = 0.0
    """How often a message is lost between BRPOP and the worker."""
    messages: deque[tuple[int, str]] = field(default_factory=deque)
    cards: dict[str, tuple[StageCard, float]] = field(default_factory=dict)
    streams: dict[UUID, list[Delta]] = field(default_factory=dict)
    generation: int = 0
    """Grows when everything is lost."""

    def check(self) -> None:
        """A call to the server."""
        elapse(self.loom.rng.uniform(0.0002, 0.004))
        if not self.is_up:
            raise RedisAway("Redis is away")

    def forget(self) -> None:
        """FLUSHALL, or killed without its data."""
        self.mark = False
        self.messages.clear()
        self.cards.clear()
        self.streams.clear()
        self.generation += 1

    # What the outbox calls.

    def exists(self, _key: str) -> bool:
        """The mark."""
        self.check()
        return self.mark

    def set(self, _key: str, _value: str) -> None:
        """The mark."""
        self.check()
        self.mark = True

    @property
    def producer_pool(self) -> Redis:
        """Of Celery."""
        return self

    @contextmanager
    def acquire(self, **_options: Any) -> Iterator[Redis]:
        """A producer."""
        yield self

    def send_task(self, _name: str, *, task_id: str, priority: int, **_options: Any) -> None:
        """A message for a head; late at times, twice at times."""
        self.check()
        self.messages.append((priority, task_id))
        if self.loom.rng.random() < self.repeats:
            self.loom.after(
                self.loom.rng.uniform(0.0, 20.0), lambda: self.messages.append((priority, task_id))
            )

    def take(self) -> str | None:
        """BRPOP by a worker, the most urgent first."""
        self.check()
        if not self.messages:
            return None
        message = min(self.messages, key=lambda one: one[0])
        self.messages.remove(message)
        return None if self.loom.rng.random() < self.losses else message[1]


class Streams:
    """A head's `DeltaSink` over this Redis."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    def write(self, batch: Sequence[tuple[UUID, Delta]]) -> None:
        """Appends, or raises."""
        self._redis.check()
        for job_id, delta in batch:
            self._redis.streams.setdefault(job_id, []).append(delta)


class Cards:
    """The stages' `Registry` over this Redis."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    def cards(self, model: str | None = None) -> list[StageCard]:
        """Those that did not expire."""
        self._check()
        now_s = self._redis.loom.now_s
        living = [card for card, until_s in self._redis.cards.values() if until_s > now_s]
        return [card for card in living if model in (None, card.model)]

    def announce(self, card: StageCard) -> None:
        """Puts it up."""
        self._check()
        self._redis.cards[card.incarnation] = (card, self._redis.loom.now_s + CARD_TTL_S)

    def withdraw(self, incarnation: str) -> None:
        """Takes it down."""
        self._check()
        self._redis.cards.pop(incarnation, None)

    def close(self) -> None:
        """Nothing to close."""

    def _check(self) -> None:
        try:
            self._redis.check()
        except RedisAway as error:
            raise Unavailable(str(error)) from error
