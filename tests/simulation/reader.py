"""Readers of streams, and what a stream may never do to them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from shardline.contract.job import JobProgress
from shardline.streams.cursor import Cursor
from tests.simulation.broken import require
from tests.simulation.rows import Job, Tables
from tests.simulation.servers import Redis


@dataclass(eq=False, slots=True)
class Reader:
    """One client that follows a job's stream, from Redis and, where that has a gap, from
    Postgres."""

    job: Job
    cursor: Cursor = field(default_factory=Cursor)
    tokens: list[int] = field(default_factory=list)
    place: int = 0
    generation: int = 0
    state: str | None = None

    def follow(self, redis: Redis, tables: Tables, rng: random.Random) -> None:
        """Reads what is new. Raises Broken where the stream has a gap, or takes a token back."""
        job = self.job
        if self.generation != redis.generation:
            self.generation = redis.generation
            self.place = 0
        entries = redis.streams.get(job.id, [])
        for delta in entries[self.place :]:
            self.cursor.push(delta)
        self.place = len(entries)
        if self.cursor.has_gap or job.state.terminal or rng.random() < 0.2:
            result = tables.results.get(job.id)
            attempt = tables.attempts.get((job.id, job.fence))
            ids = result.token_ids if result else attempt.tokens if attempt else ()
            state = job.state if job.state.terminal else None
            self.cursor.catch_up(JobProgress(fence=job.fence, token_ids=tuple(ids), state=state))
        for delta in self.cursor.take():
            require(delta.start <= len(self.tokens), f"a gap in the stream of {job.id}")
            known = self.tokens[delta.start : delta.start + len(delta.ids)]
            is_kept = list(delta.ids[: len(known)]) == known
            require(is_kept, f"the stream of {job.id} took back {known}")
            self.tokens[delta.start :] = delta.ids or self.tokens[delta.start :]
            self.state = delta.state or self.state
