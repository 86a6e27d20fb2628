"""Rows that arrived without validation: handed to a relay for tokenising, then marked. Knows no tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, select, text

from shardline.job import JobState
from shardline.store.claims import End, end_from
from shardline.store.encoding import dump
from shardline.tables import jobs

MAX_BATCH = 256

PREPARED = text("""
UPDATE jobs SET prompt_ids = ready.prompt_ids, max_tokens = ready.max_tokens, prepared_at = now(),
    seed = coalesce(ready.seed, jobs.seed)
FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS ready(id uuid, prompt_ids int[], max_tokens int, seed bigint)
WHERE jobs.id = ready.id AND state = 'queued' AND prepared_at IS NULL
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unprepared:
    """A row as its producer wrote it, possibly by hand: nothing in it is checked."""

    id: UUID
    model: str
    prompt: str | None
    messages: Any
    prompt_ids: Sequence[int | None] | None
    params: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What preparation adds to a row. `seed` overrides the row's own if its parameters have one."""

    id: UUID
    prompt_ids: Sequence[int]
    max_tokens: int
    seed: int | None


def take_unprepared(connection: Connection, *, max_batch: int = MAX_BATCH) -> list[Unprepared]:
    """The oldest rows that nobody else is preparing; ours until this transaction ends."""
    query = (
        select(jobs.c.id, jobs.c.model, jobs.c.prompt, jobs.c.messages, jobs.c.prompt_ids, jobs.c.params)
        .where(jobs.c.state == JobState.QUEUED, jobs.c.prepared_at.is_(None))
        .order_by(jobs.c.created_at)
        .limit(max_batch)
        .with_for_update(skip_locked=True)
    )
    return [Unprepared(**row) for row in connection.execute(query).mappings()]


def mark_prepared(connection: Connection, rows: Sequence[Ready]) -> None:
    """These may be sent."""
    if rows:
        connection.execute(PREPARED, {"rows": dump(rows)})


def mark_failed(connection: Connection, errors: Mapping[UUID, Mapping[str, str]]) -> None:
    """These can never run: `failed`, with the reason."""
    ends = [End(job_id=job_id, fence=0, state=JobState.FAILED, error=error) for job_id, error in errors.items()]
    end_from(connection, ends, held=JobState.QUEUED)
