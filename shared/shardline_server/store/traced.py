"""What a trace holds of jobs in addition to their phases. Asked by relays that trace, after what
they did was committed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection, text

from shardline.contract.job import JobState

TRACED = text("""
SELECT id, model, tenant_id, state, traceparent, error ->> 'problem' AS problem,
    extract(epoch FROM now() - created_at)::float8 AS age_s, last.fence, last.worker,
    extract(epoch FROM now() - last.started_at)::float8 AS attempt_s
FROM jobs LEFT JOIN LATERAL (
    SELECT attempts.fence, attempts.worker, started_at FROM attempts
    WHERE attempts.job_id = jobs.id AND ended_at IS NOT NULL ORDER BY attempts.fence DESC LIMIT 1
) AS last ON true
WHERE id = ANY(CAST(:ids AS uuid[]))
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedJob:
    """A job as its trace needs it."""

    job_id: UUID
    model: str
    tenant: str
    state: JobState
    traceparent: str | None
    problem: str | None
    """Why it failed."""
    age_s: float
    """Since it was accepted."""
    fence: int | None
    """Of its last attempt that has ended, if there was one."""
    worker: str | None
    attempt_s: float | None
    """Since that attempt began."""


def traced(connection: Connection, ids: Collection[UUID]) -> list[TracedJob]:
    """Those that there still are."""
    rows = connection.execute(TRACED, {"ids": [str(job_id) for job_id in ids]})
    return [
        TracedJob(
            job_id=row.id,
            model=row.model,
            tenant=row.tenant_id,
            state=JobState(row.state),
            traceparent=row.traceparent,
            problem=row.problem,
            age_s=row.age_s,
            fence=row.fence,
            worker=row.worker,
            attempt_s=row.attempt_s,
        )
        for row in rows
    ]
