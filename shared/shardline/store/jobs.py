"""What doors do with jobs: insert, read, list, cancel. Knows no head and no relay, and checks no prompt."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, Select, select, text

from shardline.job import FinishReason, Job, JobState, TokenLogprob
from shardline.store.bells import ring
from shardline.store.encoding import is_any, load_job, load_logprobs
from shardline.store.inserts import FailedRequest, Stored, insert_failed, insert_jobs
from shardline.tables import DONE_CHANNEL, JOBS_CHANNEL, TERMINAL, attempts, jobs, results

__all__ = [
    "FailedRequest",
    "Progress",
    "Stored",
    "ended",
    "get_job",
    "get_jobs",
    "insert_failed",
    "insert_jobs",
    "job_progress",
    "job_rows",
    "request_cancel",
]

CANCEL = text("""
WITH locked AS (
    SELECT id FROM jobs WHERE id = ANY(CAST(:ids AS uuid[])) AND (state = 'queued' OR (state = 'running' AND :running))
    ORDER BY id FOR UPDATE
), changed AS (
    UPDATE jobs SET
        cancel_requested_at = coalesce(cancel_requested_at, now()),
        state = CASE WHEN state = 'queued' AND fence = 0 THEN 'cancelled' ELSE state END,
        finished_at = CASE WHEN state = 'queued' AND fence = 0 THEN now() END
    FROM locked WHERE jobs.id = locked.id AND jobs.state IN ('queued', 'running')
    RETURNING jobs.id, jobs.state
)
SELECT id, state FROM changed
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A job as its stream shows it: what Postgres has of its tokens. `text` is set once a result is committed."""

    state: JobState
    fence: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    text: str | None
    finish_reason: FinishReason | None
    error: dict[str, Any] | None


def get_job(connection: Connection, job_id: UUID) -> Job | None:
    """One job with its result; None when there is none of this id."""
    return next(iter(get_jobs(connection, [job_id])), None)


def get_jobs(connection: Connection, ids: Collection[UUID], *, tenant: str | None = None) -> list[Job]:
    """Those that exist, of one tenant or of all, in the order of `ids`."""
    query = job_rows().where(is_any(jobs.c.id, ids))
    if tenant is not None:
        query = query.where(jobs.c.tenant_id == tenant)
    found = {row["id"]: load_job(row) for row in connection.execute(query).mappings()}
    return [found[job_id] for job_id in ids if job_id in found]


def request_cancel(
    connection: Connection, ids: Collection[UUID], *, running: bool = True, tenant: str | None = None
) -> dict[UUID, JobState]:
    """Ask for the end of jobs, of one tenant or of all; returns the state of those that exist, afterwards.

    A job never claimed is `cancelled` at once. A requeued one, whose tokens become a result, is ended by a relay, a
    running one by its head (left alone if `running` is false).
    """
    if tenant is not None:
        # A job never changes its tenant.
        ids = list(connection.scalars(select(jobs.c.id).where(is_any(jobs.c.id, ids), jobs.c.tenant_id == tenant)))
    wanted = {"ids": list(ids), "running": running}
    changed = {row.id: JobState(row.state) for row in connection.execute(CANCEL, wanted)}
    if changed:
        ring(connection, DONE_CHANNEL if JobState.CANCELLED in changed.values() else JOBS_CHANNEL)
    others = [job_id for job_id in ids if job_id not in changed]
    known = connection.execute(select(jobs.c.id, jobs.c.state).where(is_any(jobs.c.id, others))) if others else ()
    return changed | {row.id: JobState(row.state) for row in known}


def job_progress(connection: Connection, job_id: UUID) -> Progress | None:
    """The committed tokens of a job, whatever its state: enough to re-join its stream."""
    row = connection.execute(_progress().where(jobs.c.id == job_id)).one_or_none()
    return None if row is None else _load_progress(row)


def ended(connection: Connection, ids: Collection[UUID]) -> set[UUID]:
    """Those in a terminal state."""
    return set(connection.scalars(select(jobs.c.id).where(is_any(jobs.c.id, ids), jobs.c.state.in_(TERMINAL))))


def job_rows() -> Select[Any]:
    """Whole jobs, for `load_job`: add what to select and in which order."""
    columns = [column.label(f"result_{column.name}") for column in results.columns]
    return select(jobs, *columns).outerjoin_from(jobs, results, results.c.job_id == jobs.c.id)


def _progress() -> Select[Any]:
    newest = (attempts.c.job_id == jobs.c.id) & (attempts.c.fence == jobs.c.fence)
    return (
        select(
            jobs.c.state,
            jobs.c.fence,
            jobs.c.error,
            attempts.c.tokens,
            attempts.c.logprobs.label("attempt_logprobs"),
            results.c.token_ids,
            results.c.logprobs,
            results.c.text,
            results.c.finish_reason,
        )
        .outerjoin_from(jobs, attempts, newest)
        .outerjoin(results, results.c.job_id == jobs.c.id)
    )


def _load_progress(row: Row[Any]) -> Progress:
    has_result = row.token_ids is not None
    return Progress(
        state=JobState(row.state),
        fence=row.fence,
        token_ids=tuple(row.token_ids if has_result else row.tokens or ()),
        logprobs=load_logprobs(row.logprobs if has_result else row.attempt_logprobs),
        text=row.text,
        finish_reason=FinishReason(row.finish_reason) if has_result else None,
        error=row.error,
    )
