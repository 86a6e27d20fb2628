"""Tables of a real Postgres and tables in memory that are told the same. No test."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from uuid import UUID

from sqlalchemy import Engine, text

from shardline.store import models
from shardline_server.store import outbox
from tests.integration.rows import MODEL, model_row
from tests.simulation.connection import Connection
from tests.simulation.rows import Job, Tables

Operation = Callable[..., Any]

MINUTE_S = 60.0

SNAPSHOT = text("""
SELECT jobs.id, state, jobs.fence, crashes, num_sends, sent_at IS NOT NULL,
    cancel_requested_at IS NOT NULL, worker, pipeline, jobs.exact, exactness, error ->> 'code',
    round(extract(epoch FROM lease_until - now()) / 60)::int,
    CASE WHEN not_before > requeued_at
        THEN round(extract(epoch FROM not_before - requeued_at) / 60)::int END,
    results.fence, results.token_ids, results.finish_reason, results.exact
FROM jobs LEFT JOIN results ON results.job_id = jobs.id ORDER BY jobs.created_at, jobs.id
""")
ATTEMPTS = text(
    "SELECT job_id, fence, pipeline, epoch, tokens, num_resumed, outcome, parked"
    " FROM attempts ORDER BY 1, 2"
)
PIPELINES = text(
    "SELECT id, epoch, head, ready_at IS NOT NULL, seats, exact, kv_tokens"
    " FROM pipelines ORDER BY id"
)


@dataclass(slots=True, eq=False)
class Pair:
    """A real database and tables in memory that are told the same."""

    engine: Engine
    rng: random.Random
    tables: Tables = field(init=False)
    now_s: float = 0.0
    ids: list[UUID] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)
    history: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tables = Tables(lambda: self.now_s)
        self.both(models.register_model, model_row(MODEL))
        self.both(models.versions)

    @property
    def memory(self) -> Connection:
        """A transaction on the tables in memory."""
        return Connection(self.tables)

    def both(self, operation: Operation, /, *values: Any, **named: Any) -> None:
        """A function of the store on both, and the same answer."""
        self.history.append(f"{operation.__name__} {values} {named}")
        with self.engine.begin() as connection:
            answer = operation(connection, *values, **named)
        assert _plain(operation(self.memory, *values, **named)) == _plain(answer), self.history

    def same_rows(self) -> None:
        """Every column that an operation can change."""
        with self.engine.begin() as connection:
            real_jobs = [tuple(row) for row in connection.execute(SNAPSHOT)]
            real_attempts = [tuple(row) for row in connection.execute(ATTEMPTS)]
            real_pipelines = [tuple(row) for row in connection.execute(PIPELINES)]
        rows = sorted(self.tables.jobs.values(), key=lambda job: (job.created_s, job.id))
        assert sorted(_job_row(self, job) for job in rows) == sorted(real_jobs), self.history
        assert sorted(_attempt_rows(self)) == real_attempts, self.history
        assert sorted(_pipeline_rows(self)) == real_pipelines, self.history


def _plain(answer: Any) -> Any:
    if isinstance(answer, list):
        return [(one.job_id, *_told(one)) for one in answer]
    return answer


def _told(one: Any) -> tuple[Any, ...]:
    if isinstance(one, outbox.Send):
        return one.model, one.priority, one.num_sends
    return (
        one.fence,
        one.output_ids,
        one.prompt_ids,
        one.crashes,
        one.exact,
        one.priority,
        one.max_tokens,
        one.seed,
    )


def _job_row(pair: Pair, job: Job) -> tuple[Any, ...]:
    result = pair.tables.results.get(job.id)
    lease_s = None if job.lease_s is None else round((job.lease_s - pair.now_s) / MINUTE_S)
    waits_s = job.not_before_s - (job.requeued_s or math.inf)
    wait_min = round(waits_s / MINUTE_S) if waits_s > 0 else None
    told = (
        (None,) * 4
        if result is None
        else (result.fence, list(result.token_ids), result.finish_reason, result.exact)
    )
    error = None if job.error is None else job.error["code"]
    sent = job.sent_s is not None
    cancelled = job.cancel_s is not None
    numbers = (job.fence, job.crashes, job.num_sends)
    return (
        job.id, job.state, *numbers, sent, cancelled, job.worker, job.pipeline, job.exact,
        job.exactness, error, lease_s, wait_min, *told,
    )  # fmt: skip


def _attempt_rows(pair: Pair) -> list[tuple[Any, ...]]:
    return [
        (
            job_id,
            fence,
            one.pipeline,
            one.epoch,
            list(one.tokens),
            one.num_resumed,
            one.outcome,
            one.parked,
        )
        for (job_id, fence), one in pair.tables.attempts.items()
    ]


def _pipeline_rows(pair: Pair) -> list[tuple[Any, ...]]:
    return [
        (name, row.epoch, row.head, row.ready_s is not None, row.seats, row.exact, row.kv_tokens)
        for name, row in pair.tables.pipelines.items()
    ]
