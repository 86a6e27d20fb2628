"""What doors do with jobs: insert, read, list, cancel. Knows no head and no relay, and checks no
prompt.

Locks: rows of `jobs`, in order of id.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Select, literal_column, select, text

from shardline.contract.job import Job, JobState
from shardline.contract.tables import DONE_CHANNEL, JOBS_CHANNEL, WAITS, jobs, results
from shardline.store.connection.encoding import is_any, load_job
from shardline.store.connection.notify import ring, ring_ids
from shardline.store.inserts import FailedRequest, StoredRequest, insert_failed, insert_jobs
from shardline.store.statistics.reports import states

__all__ = [
    "FailedRequest",
    "StoredRequest",
    "ended",
    "get_job",
    "get_jobs",
    "insert_failed",
    "insert_jobs",
    "job_rows",
    "request_cancel",
]

CANCEL_SQL = """
-- Those that can still be cancelled, locked in order of id.
WITH locked AS (
    SELECT id FROM jobs
    WHERE id = ANY(CAST(:ids AS uuid[]))
        AND (state = 'queued' OR (state = 'running' AND :running))
    ORDER BY id FOR UPDATE {which}
),
-- What never ran ends at once; all else is asked to, and its head or a relay ends it.
changed AS (
    UPDATE jobs SET
        cancel_requested_at = coalesce(cancel_requested_at, now()),
        state = CASE WHEN state = 'queued' AND fence = 0 THEN 'cancelled' ELSE state END,
        finished_at = CASE WHEN state = 'queued' AND fence = 0 THEN now() END
    FROM locked WHERE jobs.id = locked.id AND jobs.state IN ('queued', 'running')
    RETURNING jobs.id, jobs.state
)
SELECT id, state FROM changed
"""
ENDED = text("""
-- One look into the primary key for each id, however many jobs are active.
SELECT id FROM unnest(CAST(:ids AS uuid[])) AS asked(id)
WHERE coalesce((SELECT state FROM jobs WHERE jobs.id = asked.id), 'deleted')
    NOT IN ('queued', 'running')
""")

CANCEL = text(CANCEL_SQL.format(which=""))
CANCEL_FREE = text(CANCEL_SQL.format(which="SKIP LOCKED"))


WAITS_FOR = f"""
CASE WHEN jobs.{WAITS} THEN ARRAY(
    SELECT parent_id FROM parents_of_jobs
    WHERE job_id = jobs.id AND parents_of_jobs.state IN ('due', 'open') ORDER BY parent_id) END
"""  # noqa: S608 (a constant of ours)


def get_job(connection: Connection, job_id: UUID) -> Job | None:
    """One job with its result; None when there is none of this id."""
    return next(iter(get_jobs(connection, [job_id])), None)


def get_jobs(connection: Connection, ids: Collection[UUID]) -> list[Job]:
    """Those that exist, in the order of `ids`."""
    query = job_rows().where(is_any(jobs.c.id, ids))
    found = {row["id"]: load_job(row) for row in connection.execute(query).mappings()}
    return [found[job_id] for job_id in ids if job_id in found]


def request_cancel(
    connection: Connection,
    ids: Collection[UUID],
    *,
    running: bool = True,
    tenant: str | None = None,
    waits: bool = True,
) -> dict[UUID, JobState]:
    """Ask for the end of jobs, of one tenant or of all; returns the state of those that exist,
    afterwards. Unless it `waits`, those that somebody has locked are left alone and out.

    A job never claimed is `cancelled` at once. A requeued one, with tokens that become a result, is
    ended by a relay, a running one by its head (left alone if `running` is false).
    """
    if tenant is not None:
        # A job never changes its tenant.
        ids = list(
            connection.scalars(
                select(jobs.c.id).where(is_any(jobs.c.id, ids), jobs.c.tenant_id == tenant)
            )
        )
    wanted = {"ids": list(ids), "running": running}
    cancel = CANCEL if waits else CANCEL_FREE
    changed = {row.id: JobState(row.state) for row in connection.execute(cancel, wanted)}
    cancelled = [job_id for job_id, state in changed.items() if state is JobState.CANCELLED]
    if cancelled:
        ring_ids(connection, DONE_CHANNEL, cancelled)
    elif changed:
        ring(connection, JOBS_CHANNEL)
    others = [job_id for job_id in ids if job_id not in changed]
    known = states(connection, others) if others else {}
    changes = {JobState.QUEUED, JobState.RUNNING} if running else {JobState.QUEUED}
    return changed | {
        job_id: JobState(state) for job_id, state in known.items() if waits or state not in changes
    }


def ended(connection: Connection, ids: Collection[UUID]) -> set[UUID]:
    """Those in a terminal state, and those that somebody has deleted: they were jobs once."""
    return set(connection.scalars(ENDED, {"ids": list(ids)}))


def job_rows() -> Select[Any]:
    """Whole jobs, for `load_job`: add what to select and in which order."""
    columns = [column.label(f"result_{column.name}") for column in results.columns]
    return select(jobs, literal_column(WAITS_FOR).label("waits_for"), *columns).outerjoin_from(
        jobs, results, results.c.job_id == jobs.c.id
    )
