"""What came of a set of jobs, for those who report on them: states, results, a sample. Knows no job
in the making.

Reads only, with few columns: whole jobs are in `jobs`, pages of them in `listing`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, text

from shardline.contract.job import Usage

MAX_SAMPLE = 6

STATES = text("SELECT id, state FROM jobs WHERE id = ANY(CAST(:ids AS uuid[]))")
TENANTS = text("SELECT id, tenant_id FROM jobs WHERE id = ANY(CAST(:ids AS uuid[]))")

OUTCOMES = text("""
SELECT jobs.id, jobs.state, jobs.prompt, jobs.error, jobs.created_at, jobs.finished_at,
    results.text, results.completion_tokens, results.provenance
FROM jobs LEFT JOIN results ON results.job_id = jobs.id
WHERE jobs.id = ANY(CAST(:ids AS uuid[])) ORDER BY jobs.created_at, jobs.id
""")

USAGE = text(
    "SELECT prompt_tokens, completion_tokens, cached_tokens, reasoning_tokens "
    "FROM results WHERE job_id = :job_id"
)

SAMPLE = text(f"""
SELECT jobs.id, jobs.prompt, results.text, results.completion_tokens AS tokens,
    round(extract(epoch FROM jobs.finished_at - jobs.created_at)::numeric, 2) AS seconds
FROM jobs JOIN results ON results.job_id = jobs.id
WHERE jobs.id = ANY(CAST(:ids AS uuid[])) ORDER BY random() LIMIT {MAX_SAMPLE}
""")  # noqa: S608 (a constant of ours)


def states(connection: Connection, ids: Collection[UUID]) -> dict[UUID, str]:
    """The state of every job that has a row by now."""
    return {row.id: row.state for row in connection.execute(STATES, {"ids": list(ids)})}


def tenants(connection: Connection, ids: Collection[UUID]) -> dict[UUID, str]:
    """Maps jobs that have a row to their tenants."""
    return {row.id: row.tenant_id for row in connection.execute(TENANTS, {"ids": list(ids)})}


def usage(connection: Connection, job_id: UUID) -> Usage | None:
    """The token counts of a job's result; None without one."""
    row = connection.execute(USAGE, {"job_id": job_id}).one_or_none()
    return None if row is None else Usage(**row._asdict())


def outcomes(connection: Connection, ids: Collection[UUID]) -> list[dict[str, Any]]:
    """Jobs with their results, the oldest first; `text` is None without one."""
    return [dict(row) for row in connection.execute(OUTCOMES, {"ids": list(ids)}).mappings()]


def sample(connection: Connection, ids: Collection[UUID]) -> list[dict[str, Any]]:
    """Some of those that have a result, at most MAX_SAMPLE, drawn at random."""
    return [dict(row) for row in connection.execute(SAMPLE, {"ids": list(ids)}).mappings()]
