"""Lists of jobs, page by page, newest first: what a page costs depends on its length, not on how many jobs there are.

Each filter walks an index in its own order. Without bodies: prompts, ids and completions are read job by job.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, TextClause, select, text

from shardline.job import FinishReason, JobState, JobSummary, Usage
from shardline.tables import DEAD, jobs

MAX_LISTED = 1_000
MAX_PROMPT_CHARS = 100
"""Of a prompt in a list."""

# By an index of (tenant, state, time) or (tenant, model, state, time): one short walk for each tenant and state.
WALKS = """
SELECT newest.created_at, newest.id
FROM (SELECT id FROM tenants WHERE id = CAST(:tenant AS text) OR CAST(:tenant AS text) IS NULL) AS owner
CROSS JOIN unnest(CAST(:states AS text[])) AS wanted(state)
CROSS JOIN LATERAL (
    SELECT created_at, id FROM jobs WHERE tenant_id = owner.id AND state = wanted.state {rules}
    ORDER BY created_at DESC, id DESC LIMIT {limit}
) AS newest
"""

# The limits are literals, so that the planner walks an index in order instead of sorting what it matches.
PAGE = """
WITH page AS MATERIALIZED (
    {rows} ORDER BY {column} DESC, id DESC LIMIT {limit}
-- Of a long prompt only the beginning is read.
)
SELECT jobs.id, jobs.tenant_id, jobs.model, jobs.state, jobs.priority, jobs.created_at, jobs.finished_at,
    jobs.cancel_requested_at IS NOT NULL AS cancel_requested, jobs.crashes, jobs.replay_of, jobs.error,
    substr(jobs.prompt, 1, {max_prompt_chars}) AS prompt_start,
    results.prompt_tokens, results.completion_tokens, results.finish_reason
FROM page JOIN jobs ON jobs.id = page.id LEFT JOIN results ON results.job_id = page.id
ORDER BY page.{column} DESC, page.id DESC
"""


def list_jobs(
    connection: Connection,
    *,
    state: JobState | None = None,
    model: str | None = None,
    tenant: str | None = None,
    limit: int = 100,
    after: UUID | None = None,
) -> list[JobSummary]:
    """Newest first, at most `limit`; `after` is the last id of the page before. Without `tenant` those of all."""
    last_at = _place(connection, "created_at", after, tenant)
    if after is not None and last_at is None:
        return []
    rules = "" if model is None else "AND model = :model"
    rules += "" if after is None else " AND (created_at, id) < (:last_at, :after)"
    limit = min(limit, MAX_LISTED)
    if tenant is None and state is None and model is None:
        rows = f"SELECT created_at, id FROM jobs WHERE true {rules}"  # noqa: S608 (constants)
    else:
        rows = WALKS.format(rules=rules, limit=limit)
    values = {"tenant": tenant, "model": model, "states": list(JobState) if state is None else [state]}
    return _summaries(connection, _page(rows, "created_at", limit), {**values, "last_at": last_at, "after": after})


def list_dead(
    connection: Connection, *, model: str | None = None, limit: int = 100, after: UUID | None = None
) -> list[JobSummary]:
    """Dead letters, the newest end first, at most `limit`; `after` is the last id of the page before."""
    last_at = _place(connection, "finished_at", after, None)
    if after is not None and last_at is None:
        return []
    rules = "" if model is None else "AND model = :model"
    rules += "" if after is None else " AND (finished_at, id) < (:last_at, :after)"
    rows = f"SELECT finished_at, id FROM jobs WHERE {DEAD} {rules}"  # noqa: S608 (constants)
    query = _page(rows, "finished_at", min(limit, MAX_LISTED))
    return _summaries(connection, query, {"model": model, "last_at": last_at, "after": after})


def _page(rows: str, column: str, limit: int) -> TextClause:
    return text(PAGE.format(rows=rows, column=column, limit=limit, max_prompt_chars=MAX_PROMPT_CHARS))


def _place(connection: Connection, column: str, after: UUID | None, tenant: str | None) -> datetime | None:
    """Where the page before ended; None when it is not to be told, and then nothing comes after it."""
    if after is None:
        return None
    query = select(jobs.c[column]).where(jobs.c.id == after)
    return connection.scalar(query if tenant is None else query.where(jobs.c.tenant_id == tenant))


def _summaries(connection: Connection, query: TextClause, values: dict[str, Any]) -> list[JobSummary]:
    return [_summary(row) for row in connection.execute(query, values)]


def _summary(row: Row[Any]) -> JobSummary:
    has_result = row.finish_reason is not None
    return JobSummary(
        id=row.id,
        tenant=row.tenant_id,
        model=row.model,
        state=JobState(row.state),
        priority=row.priority,
        created_at=row.created_at,
        finished_at=row.finished_at,
        cancel_requested=row.cancel_requested,
        crashes=row.crashes,
        replay_of=row.replay_of,
        error=row.error,
        prompt_start=row.prompt_start,
        finish_reason=FinishReason(row.finish_reason) if has_result else None,
        usage=Usage(prompt_tokens=row.prompt_tokens, completion_tokens=row.completion_tokens) if has_result else None,
    )
