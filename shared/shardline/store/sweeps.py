"""What relays repair: expired leases, passed deadlines, cancels of waiting jobs. Knows no tokenizer: text comes from
a function that the relay gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, select, text

from shardline.job import FinishReason, JobState, Result, Usage
from shardline.store.claims import End, Key, end_from, requeue
from shardline.store.encoding import load_logprobs
from shardline.tables import attempts

MAX_BATCH = 256
MAX_HISTORY = 10

Decode = Callable[[str, Sequence[int]], str]
"""Model and token ids → text."""

# After a restart of Postgres heads need time to beat again: one lease.
LOCK_EXPIRED = text("""
SELECT id FROM jobs
WHERE state = 'running' AND lease_until < now()
    AND pg_postmaster_start_time() < now() - make_interval(secs => :lease_s)
ORDER BY lease_until LIMIT :max_batch FOR UPDATE SKIP LOCKED
""")

# Each half walks its own partial index: a table of finished jobs is never read.
LOCK_OVER = text("""
WITH over AS (
    (SELECT id FROM jobs WHERE state = 'queued' AND cancel_requested_at IS NOT NULL ORDER BY id LIMIT :max_batch)
    UNION
    (SELECT id FROM jobs WHERE state = 'queued' AND deadline_at <= now() ORDER BY deadline_at LIMIT :max_batch)
)
SELECT id FROM jobs
WHERE id = ANY(ARRAY(SELECT id FROM over)) AND state = 'queued'
    AND (cancel_requested_at IS NOT NULL OR deadline_at <= now())
ORDER BY id FOR UPDATE SKIP LOCKED
""")

# In a statement of its own: it must see the tokens that the last holder committed before we got the lock.
CONTENTS = text("""
SELECT jobs.id, jobs.fence, model, crashes, max_crashes, coalesce(cardinality(prompt_ids), 0) AS num_prompt,
    cancel_requested_at IS NOT NULL AS is_cancelled, coalesce(deadline_at <= now(), false) AS is_expired,
    coalesce(tokens, '{}') AS tokens, logprobs, coalesce(cardinality(tokens) > num_resumed, false) AS has_progress
FROM jobs LEFT JOIN attempts ON attempts.job_id = jobs.id AND attempts.fence = jobs.fence
WHERE jobs.id = ANY(CAST(:ids AS uuid[]))
""")

COUNTS = text(
    "SELECT model, state, count(*) AS number FROM jobs WHERE state IN ('queued', 'running') GROUP BY model, state"
)


def sweep_waiting(connection: Connection, decode: Decode, *, max_batch: int = MAX_BATCH) -> dict[UUID, str]:
    """End queued jobs that were cancelled or whose deadline passed. Returns their states."""
    over = _locked(connection, LOCK_OVER, max_batch=max_batch)
    return {**end_from(connection, [_stopped(row, decode) for row in over], held=JobState.QUEUED)}


def sweep_leases(
    connection: Connection, decode: Decode, *, lease_s: float, max_batch: int = MAX_BATCH
) -> dict[UUID, str]:
    """Move running jobs whose lease expired: stopped as asked, else requeued, or `failed` once their crashes reach
    max_crashes. Only an attempt that saved no token of its own counts as a crash. Returns the state of those that
    ended, and `lost` or `crashed` for those that were requeued."""
    ends: list[End] = []
    lost: list[Key] = []
    crashed: list[Key] = []
    for row in _locked(connection, LOCK_EXPIRED, lease_s=lease_s, max_batch=max_batch):
        if row.is_cancelled or row.is_expired:
            ends.append(_stopped(row, decode))
        elif row.has_progress:
            lost.append((row.id, row.fence))
        elif row.crashes + 1 < row.max_crashes:
            crashed.append((row.id, row.fence))
        else:
            ends.append(_dead_letter(connection, row))
    return {
        **dict.fromkeys(requeue(connection, lost, outcome="lost"), "lost"),
        **dict.fromkeys(requeue(connection, crashed, outcome="crashed", crashes=1), "crashed"),
        **end_from(connection, ends, held=JobState.RUNNING),
    }


def counts(connection: Connection) -> dict[tuple[str, str], int]:
    """Jobs that have not ended, by model and state."""
    return {(row.model, row.state): row.number for row in connection.execute(COUNTS)}


def _locked(connection: Connection, lock: Any, **values: Any) -> Iterable[Row[Any]]:
    ids = list(connection.scalars(lock, values))
    return connection.execute(CONTENTS, {"ids": ids}) if ids else ()


def _stopped(row: Row[Any], decode: Decode) -> End:
    """Cancelled or expired; the tokens that were saved become a partial result."""
    state, reason = (
        (JobState.CANCELLED, FinishReason.CANCELLED) if row.is_cancelled else (JobState.EXPIRED, FinishReason.EXPIRED)
    )
    return End(
        job_id=row.id, fence=row.fence, state=state, result=_partial(row, reason, decode) if row.tokens else None
    )


def _partial(row: Row[Any], reason: FinishReason, decode: Decode) -> Result:
    return Result(
        job_id=row.id,
        text=decode(row.model, row.tokens),
        token_ids=tuple(row.tokens),
        usage=Usage(prompt_tokens=row.num_prompt, completion_tokens=len(row.tokens)),
        finish_reason=reason,
        exact=True,
        logprobs=load_logprobs(row.logprobs),
        provenance={"ended_by": "relay"},
    )


def _dead_letter(connection: Connection, row: Row[Any]) -> End:
    num_crashes = row.crashes + 1
    error = {
        "code": "crashed",
        "problem": f"{num_crashes} attempts ended without a token: the worker died or hung each time",
        "remedy": "Look at the workers' logs of these times; send the request again as a new job when it is solved",
        "crashes": num_crashes,
        "attempts": _history(connection, row.id),
    }
    return End(job_id=row.id, fence=row.fence, state=JobState.FAILED, error=error)


def _history(connection: Connection, job_id: UUID) -> list[dict[str, Any]]:
    columns = [attempts.c[name] for name in ("fence", "pipeline", "worker", "outcome", "started_at", "heartbeat_at")]
    newest = select(*columns).where(attempts.c.job_id == job_id).order_by(attempts.c.fence.desc()).limit(MAX_HISTORY)
    return [dict(row) for row in connection.execute(newest).mappings()]
