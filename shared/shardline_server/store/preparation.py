"""Rows that arrived without validation: loaned to a relay for tokenizing, then marked. Knows no
tokenizer.

A loan locks no row: it is a time in the row, after which any relay may have it. Who marks first is
right.
Locks: rows of `jobs` with SKIP LOCKED, or in order of id for callers that wait. What stays locked
is loaned again after its lease.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, text

from shardline.contract.job import MAX_METADATA_BYTES, JobState
from shardline.contract.tables import IS_READY
from shardline.store.connection.encoding import dump
from shardline_server.store.ends import End, end_queued

MAX_BATCH = 128
MAX_BYTES = 1 << 20
"""Of a batch, about, and one row more: a second's work of a slow tokenizer."""

MAX_METADATA_CHARS = 64 * MAX_METADATA_BYTES
"""As Postgres writes them: 1e308 with all its digits, so more than a door may have counted."""

TAKE = text(f"""
-- The oldest that no relay has. Their sizes are known without reading a text; chats are kept
-- compressed, to a quarter of their length or more.
WITH oldest AS (
    SELECT id, created_at,
        coalesce(octet_length(prompt), 0) + 4 * coalesce(pg_column_size(messages), 0)
        + coalesce(pg_column_size(prompt_ids), 0) + 4 * pg_column_size(metadata) AS num_bytes
    FROM jobs
    WHERE state = 'queued' AND prepared_at IS NULL AND ({IS_READY})
        AND (preparing_until IS NULL OR preparing_until <= now())
    ORDER BY created_at LIMIT :max_batch FOR NO KEY UPDATE SKIP LOCKED
),
-- How many bytes the rows before each one take: the first one is in, however long it is.
totals AS (
    SELECT id, sum(num_bytes) OVER (ORDER BY created_at, id) - num_bytes AS num_bytes_before
    FROM oldest
),
-- Those that fit, loaned for one lease: if the relay dies, any other may have them after that.
lent AS (
    UPDATE jobs SET preparing_until = now() + make_interval(secs => :lease_s)
    FROM totals WHERE jobs.id = totals.id AND totals.num_bytes_before < :max_bytes
    RETURNING jobs.id, model, prompt, messages, prompt_ids, params, retry, created_at, depends_on,
        CASE WHEN octet_length(metadata::text) <= :max_metadata_chars THEN metadata END AS metadata
)
SELECT id, model, prompt, messages, prompt_ids, params, retry, depends_on, metadata
FROM lent ORDER BY created_at, id
""")  # noqa: S608 (a constant of ours)

# By their ids: `num_nulls` means the same as `prepared_at IS NULL`, and does not invite Postgres to
# read all that waits for preparation by jobs_to_prepare, which looks small until the table is
# analyzed after a bulk load.
MARK_UNPREPARED = text("""
UPDATE jobs SET prompt_ids = ready.prompt_ids, max_tokens = ready.max_tokens,
    prepared_at = now(), model = ready.model,
    params = jobs.params || jsonb_strip_nulls(jsonb_build_object('adapter', ready.adapter)),
    seed = coalesce(ready.seed, jobs.seed)
FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS ready(
    id uuid, model text, adapter text, prompt_ids int[], max_tokens int, seed bigint)
WHERE jobs.id = ready.id AND state = 'queued' AND num_nulls(prepared_at) = 1
""")

UNPREPARED = """
SELECT id FROM jobs
WHERE id = ANY(CAST(:ids AS uuid[])) AND state = 'queued' AND num_nulls(prepared_at) = 1
ORDER BY id FOR NO KEY UPDATE
"""
LOCK_UNPREPARED = text(f"{UNPREPARED} SKIP LOCKED")
AWAIT_UNPREPARED = text(UNPREPARED)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpreparedJob:
    """A row as its producer wrote it, possibly by hand: nothing in it is checked."""

    id: UUID
    model: str
    prompt: str | None
    messages: Any
    prompt_ids: Sequence[int | None] | None
    params: Any
    retry: Any
    depends_on: Any
    metadata: Any
    """None: too large to be looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedJob:
    """What preparation adds to a row. `seed` overrides the row's own if its parameters have one.
    `model:adapter` is taken apart: the model into its column, the adapter among its parameters."""

    id: UUID
    model: str
    adapter: str | None = None
    prompt_ids: Sequence[int]
    max_tokens: int
    seed: int | None


def take_unprepared(
    connection: Connection,
    *,
    lease_s: float,
    max_batch: int = MAX_BATCH,
    max_bytes: int = MAX_BYTES,
) -> list[UnpreparedJob]:
    """Takes the oldest rows that no other relay is preparing; ours for `lease_s` once the caller
    commits."""
    values = {
        "lease_s": lease_s,
        "max_batch": max_batch,
        "max_bytes": max_bytes,
        "max_metadata_chars": MAX_METADATA_CHARS,
    }
    return [UnpreparedJob(**row) for row in connection.execute(TAKE, values).mappings()]


def mark_if_unprepared(
    connection: Connection, rows: Sequence[PreparedJob], *, waits: bool = False
) -> int:
    """Mark rows as prepared, so that the outbox sends them. Returns how many were not marked
    before, and not locked unless `waits`."""
    locked = set(_lock(connection, [row.id for row in rows], waits=waits))
    marked = [row for row in rows if row.id in locked]
    return connection.execute(MARK_UNPREPARED, {"rows": dump(marked)}).rowcount if marked else 0


def fail_if_unprepared(
    connection: Connection, errors: Mapping[UUID, Mapping[str, str]], *, waits: bool = False
) -> list[UUID]:
    """End rows that can never run as `failed`, with the reason. Returns those that were not marked
    before, and not locked unless `waits`."""
    ends = [
        End(job_id=job_id, fence=0, state=JobState.FAILED, error=errors[job_id])
        for job_id in _lock(connection, list(errors), waits=waits)
    ]
    return list(end_queued(connection, ends))


def _lock(connection: Connection, ids: Sequence[UUID], *, waits: bool) -> Sequence[UUID]:
    lock = AWAIT_UNPREPARED if waits else LOCK_UNPREPARED
    return connection.scalars(lock, {"ids": ids}).all() if ids else ()
