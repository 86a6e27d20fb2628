"""What relays repair: expired leases, passed deadlines, cancels of waiting jobs. Bounded in rows
and in bytes.

Knows no tokenizer: text comes from a function that the relay gives.
Locks: rows of `jobs` with SKIP LOCKED, so in any order: what somebody else has locked has its turn
the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text

from shardline.contract.job import (
    PROMPT_END_TOKENS,
    FinishReason,
    JobState,
    Result,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from shardline.contract.tables import IS_READY, WAITS
from shardline.store.connection.encoding import load_logprobs, readable_params
from shardline_server.store import crashes
from shardline_server.store.crashes import NO_CEILING, AttemptLimits
from shardline_server.store.ends import End, end_queued, end_running

MAX_BATCH = 64
MAX_COUNTED = 20_000
"""Of one state and model; more are shown as this many."""

PAUSED = "paused"
WAITING = "waiting"
"""What queued jobs are counted as that a pause holds, and that wait for parents."""

MAX_BYTES = 8 << 20
"""Of partial results in one sweep, about, and one more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """What was saved of a job that is to stop."""

    job_id: UUID
    fence: int
    model: str
    params: SamplingParams
    max_tokens: int
    num_prompt: int
    prompt_end: tuple[int, ...]
    """The prompt's last tokens, behind which the text is decoded."""
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None

    @property
    def key(self) -> tuple[UUID, int, int]:
        """Returns the key of its text: under one fence tokens are only added."""
        return self.job_id, self.fence, len(self.ids)


Decode = Callable[[Partial], str | None]
"""Its text. None: not known yet, and the job waits for the next sweep. A transaction is open
meanwhile."""

# After a restart of Postgres heads need time to beat again: one lease.
LOCK_EXPIRED = text("""
SELECT id FROM jobs
WHERE state = 'running' AND lease_until < now()
    AND pg_postmaster_start_time() < now() - make_interval(secs => :lease_s)
ORDER BY lease_until LIMIT :max_batch FOR NO KEY UPDATE SKIP LOCKED
""")

# Each half walks its own partial index: a table of finished jobs is never read.
LOCK_STOPPED = text("""
-- The oldest that were cancelled; locked rows do not count.
WITH cancelled AS (
    SELECT id FROM jobs WHERE state = 'queued' AND cancel_requested_at IS NOT NULL
    ORDER BY id LIMIT :max_batch FOR NO KEY UPDATE SKIP LOCKED
),
-- Those with the earliest deadlines, likewise.
late AS (
    SELECT id FROM jobs WHERE state = 'queued' AND deadline_at <= now()
    ORDER BY deadline_at LIMIT :max_batch FOR NO KEY UPDATE SKIP LOCKED
)
SELECT id FROM cancelled UNION SELECT id FROM late ORDER BY id
""")

PARTIALS = text("""
-- Sizes of what was saved, known without reading a token. Log-probabilities are kept compressed, to
-- an eighth of their length or more.
WITH sizes AS (
    SELECT jobs.id, pg_column_size(attempts.tokens)
        + 8 * coalesce(pg_column_size(attempts.logprobs), 0) AS num_bytes
    FROM jobs JOIN attempts ON attempts.job_id = jobs.id AND attempts.fence = jobs.fence
    WHERE jobs.id = ANY(CAST(:ids AS uuid[]))
),
-- How many bytes the rows before each one take: the first one is in, however long it is.
totals AS (
    SELECT id, sum(num_bytes) OVER (ORDER BY id) - num_bytes AS num_bytes_before FROM sizes
)
SELECT jobs.id, jobs.fence, jobs.model, jobs.params, jobs.max_tokens,
    coalesce(cardinality(jobs.prompt_ids), 0) AS num_prompt,
    jobs.prompt_ids[cardinality(jobs.prompt_ids) - :num_prompt_end + 1 :] AS prompt_end,
    attempts.tokens, attempts.logprobs
FROM totals JOIN jobs ON jobs.id = totals.id
JOIN attempts ON attempts.job_id = jobs.id AND attempts.fence = jobs.fence
WHERE totals.num_bytes_before < :max_bytes
""")

# Waits with the heads where one of the tables that they write is locked, also against writes alone
# (CREATE INDEX): this silence ends no lease. now() is the moment before the wait.
FIX_NOW = text("LOCK TABLE jobs, attempts, pipelines, results IN ROW EXCLUSIVE MODE")

COUNTS = text(f"""
-- Each state and model that there is, by one step in jobs_active.
WITH RECURSIVE pairs AS (
    (SELECT state, model FROM jobs WHERE state IN ('queued', 'running')
        ORDER BY state, model LIMIT 1)
    UNION ALL
    SELECT next.state, next.model FROM pairs CROSS JOIN LATERAL (
        SELECT state, model FROM jobs
        WHERE state IN ('queued', 'running') AND (state, model) > (pairs.state, pairs.model)
        ORDER BY state, model LIMIT 1
    ) AS next
)
SELECT model, state, (
    SELECT count(*) FROM (
        SELECT FROM jobs
        WHERE state IN ('queued', 'running') AND state = pairs.state AND model = pairs.model
            AND (state = 'running' OR paused_by IS NULL AND ({IS_READY}))
        LIMIT {MAX_COUNTED}
    ) AS counted
) AS number FROM pairs
UNION ALL SELECT model, '{PAUSED}', count(*) FROM (
    SELECT model FROM jobs WHERE state = 'queued' AND paused_by IS NOT NULL LIMIT {MAX_COUNTED}
) AS paused GROUP BY model
UNION ALL SELECT model, '{WAITING}', count(*) FROM (
    SELECT model FROM jobs WHERE {WAITS} AND paused_by IS NULL LIMIT {MAX_COUNTED}
) AS waiting GROUP BY model
""")  # noqa: S608 (a constant of ours)


def fix_now(connection: Connection) -> None:
    """Fixes the time as a transaction's first statement: Postgres's now() is this moment in all
    that follow."""
    connection.execute(FIX_NOW)


def sweep_stopped_queued(
    connection: Connection, decode: Decode, *, max_batch: int = MAX_BATCH
) -> dict[UUID, str]:
    """End queued jobs that were cancelled or passed their deadline. Returns their states."""
    stopped = _locked(connection, LOCK_STOPPED, max_batch=max_batch)
    return {**end_queued(connection, _ends(connection, stopped, decode))}


def sweep_expired_leases(
    connection: Connection,
    decode: Decode,
    *,
    lease_s: float,
    limits: AttemptLimits = NO_CEILING,
    max_batch: int = MAX_BATCH,
) -> dict[UUID, str]:
    """Move running jobs with an expired lease: stopped as asked, else as `crashes.requeue_or_fail`
    decides. Returns the state of those that ended, and `released`, `lost` or `crashed` for those
    that were requeued."""
    rows = _locked(connection, LOCK_EXPIRED, lease_s=lease_s, max_batch=max_batch)
    stopped = [row for row in rows if _is_stopped(row)]
    others = [row for row in rows if not _is_stopped(row)]
    return {
        **crashes.requeue_or_fail(connection, others, limits=limits),
        **end_running(connection, _ends(connection, stopped, decode)),
    }


def count_active(connection: Connection) -> dict[tuple[str, str], int]:
    """Jobs that have not ended, by model and state, those that cannot be sent as PAUSED or WAITING
    instead of queued; at most MAX_COUNTED of each."""
    counted = connection.execute(COUNTS)
    return {(row.model, row.state): row.number for row in counted if row.number}


def _locked(connection: Connection, lock: Any, **values: Any) -> list[Row[Any]]:
    return list(crashes.last_attempts(connection, list(connection.scalars(lock, values))))


def _is_stopped(row: Row[Any]) -> bool:
    return bool(row.is_cancelled or row.is_expired)


def _ends(connection: Connection, rows: Sequence[Row[Any]], decode: Decode) -> list[End]:
    """Cancelled or expired; the tokens that were saved become a partial result. What is too much
    for one sweep, or has no text yet, stays as it is."""
    partials = _partials(connection, [row.id for row in rows if row.has_tokens])
    ends = []
    for row in rows:
        state, reason = (
            (JobState.CANCELLED, FinishReason.CANCELLED)
            if row.is_cancelled
            else (JobState.EXPIRED, FinishReason.EXPIRED)
        )
        result = None
        if row.has_tokens:
            partial = partials.get(row.id)
            decoded = None if partial is None else decode(partial)
            if partial is None or decoded is None:
                continue
            result = _result(partial, decoded, reason)
        ends.append(End(job_id=row.id, fence=row.fence, state=state, result=result))
    return ends


def _partials(connection: Connection, ids: Sequence[UUID]) -> dict[UUID, Partial]:
    values = {"ids": ids, "max_bytes": MAX_BYTES, "num_prompt_end": PROMPT_END_TOKENS}
    rows = connection.execute(PARTIALS, values) if ids else ()
    return {
        row.id: Partial(
            job_id=row.id,
            fence=row.fence,
            model=row.model,
            params=readable_params(row.params),
            max_tokens=row.max_tokens,
            num_prompt=row.num_prompt,
            prompt_end=tuple(row.prompt_end or ()),
            ids=tuple(row.tokens),
            logprobs=load_logprobs(row.logprobs),
        )
        for row in rows
    }


def _result(partial: Partial, decoded: str, reason: FinishReason) -> Result:
    return Result(
        job_id=partial.job_id,
        text=decoded,
        token_ids=partial.ids,
        usage=Usage(prompt_tokens=partial.num_prompt, completion_tokens=len(partial.ids)),
        finish_reason=reason,
        exact=True,
        logprobs=partial.logprobs,
        provenance={"ended_by": "relay"},
    )
