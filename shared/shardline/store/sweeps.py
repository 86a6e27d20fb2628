"""What relays repair: expired leases, passed deadlines, cancels of waiting jobs. Knows no tokenizer: text comes from
a function that the relay gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text

from shardline.job import FinishReason, JobState, Result, SamplingParams, Usage
from shardline.store import crashes
from shardline.store.claims import End, end_from
from shardline.store.encoding import load_logprobs, readable_params

MAX_BATCH = 256

Decode = Callable[[str, SamplingParams, int, Sequence[int]], str]
"""Model, parameters, max_tokens and token ids → text."""

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

FIX_NOW = text("SELECT now()")

COUNTS = text(
    "SELECT model, state, count(*) AS number FROM jobs WHERE state IN ('queued', 'running') GROUP BY model, state"
)


def fix_now(connection: Connection) -> None:
    """As a transaction's first statement: Postgres's now() is this moment in all that follow."""
    connection.execute(FIX_NOW)


def sweep_waiting(connection: Connection, decode: Decode, *, max_batch: int = MAX_BATCH) -> dict[UUID, str]:
    """End queued jobs that were cancelled or whose deadline passed. Returns their states."""
    over = _locked(connection, LOCK_OVER, max_batch=max_batch)
    return {**end_from(connection, [_stopped(row, decode) for row in over], held=JobState.QUEUED)}


def sweep_leases(
    connection: Connection, decode: Decode, *, lease_s: float, max_batch: int = MAX_BATCH
) -> dict[UUID, str]:
    """Move running jobs whose lease expired: stopped as asked, else as `crashes.judge` says. Returns the state of
    those that ended, and `lost` or `crashed` for those that were requeued."""
    rows = list(_locked(connection, LOCK_EXPIRED, lease_s=lease_s, max_batch=max_batch))
    over = [_stopped(row, decode) for row in rows if _is_over(row)]
    return {
        **crashes.judge(connection, [row for row in rows if not _is_over(row)]),
        **end_from(connection, over, held=JobState.RUNNING),
    }


def counts(connection: Connection) -> dict[tuple[str, str], int]:
    """Jobs that have not ended, by model and state."""
    return {(row.model, row.state): row.number for row in connection.execute(COUNTS)}


def _locked(connection: Connection, lock: Any, **values: Any) -> Iterable[Row[Any]]:
    return crashes.contents(connection, list(connection.scalars(lock, values)))


def _is_over(row: Row[Any]) -> bool:
    return bool(row.is_cancelled or row.is_expired)


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
        text=decode(row.model, readable_params(row.params), row.max_tokens, row.tokens),
        token_ids=tuple(row.tokens),
        usage=Usage(prompt_tokens=row.num_prompt, completion_tokens=len(row.tokens)),
        finish_reason=reason,
        exact=True,
        logprobs=load_logprobs(row.logprobs),
        provenance={"ended_by": "relay"},
    )
