"""Lists of jobs, page by page, newest first: what a page costs depends on its length, not on how
many jobs there are.

Each filter walks an index in its own order. Without bodies: prompts, ids and completions are read
job by job.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Self
from uuid import UUID

from sqlalchemy import Connection, Row, TextClause, select, text

from shardline.base.errors import Invalid
from shardline.contract.job import FinishReason, JobState, JobSummary, Usage
from shardline.contract.tables import DEAD, WAITS, jobs

MAX_LISTED = 1_000
MAX_PROMPT_CHARS = 100
"""Of a prompt in a list."""

MAX_CHAT_BYTES = 4096
"""As stored, compressed: of a longer chat a list shows nothing."""

REMEDY = (
    "List from the start, or go on from the end of the page before "
    "(over HTTP its `next`), which needs no row"
)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
PAGE_END = re.compile(r"(-?[0-9]{1,18})-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})", re.ASCII)

# By an index of (tenant, state, time) or (tenant, model, state, time): one short walk for each
# tenant and state.
WALKS = """
SELECT newest.created_at, newest.id
FROM (
    SELECT id FROM tenants WHERE id = CAST(:tenant AS text) OR CAST(:tenant AS text) IS NULL
) AS owner
CROSS JOIN unnest(CAST(:states AS text[])) AS wanted(state)
CROSS JOIN LATERAL (
    SELECT created_at, id FROM jobs WHERE tenant_id = owner.id AND state = wanted.state {rules}
    ORDER BY created_at DESC, id DESC LIMIT {limit}
) AS newest
"""

# The limits are literals, so that the planner walks an index in order instead of sorting what it
# matches.
PAGE = """
-- The ids of one page, before any body is read.
WITH page AS MATERIALIZED (
    {rows} ORDER BY {column} DESC, id DESC LIMIT {limit}
)
-- Of a long prompt only the beginning is read, of a chat its last message: a long one would be
-- decompressed whole.
SELECT jobs.id, jobs.tenant_id, jobs.model, jobs.state, jobs.priority, jobs.created_at,
    jobs.finished_at, jobs.cancel_requested_at IS NOT NULL AS cancel_requested,
    jobs.crashes, jobs.replay_of, jobs.error,
    jobs.{waits} AS waits_for_parents,
    coalesce(
        substr(jobs.prompt, 1, {max_prompt_chars}),
        CASE WHEN pg_column_size(jobs.messages) <= {max_chat_bytes}
            THEN substr(jobs.messages -> -1 ->> 'content', 1, {max_prompt_chars}) END
    ) AS prompt_start,
    results.prompt_tokens, results.completion_tokens, results.cached_tokens,
    results.reasoning_tokens, results.finish_reason
FROM page JOIN jobs ON jobs.id = page.id LEFT JOIN results ON results.job_id = page.id
ORDER BY page.{column} DESC, page.id DESC
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageEnd:
    """Marks where a page of `list_jobs` ended. It stands for itself, also when the row there is
    deleted meanwhile."""

    at: datetime
    """When the page's last job was created."""
    job_id: UUID

    @classmethod
    def of(cls, page: Sequence[JobSummary]) -> Self | None:
        """What `after` of the next page is; None behind an empty one."""
        return cls(at=page[-1].created_at, job_id=page[-1].id) if page else None

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """What `str` wrote; None for anything else."""
        found = PAGE_END.fullmatch(text)
        if found is None:
            return None
        try:
            return cls(at=EPOCH + timedelta(microseconds=int(found[1])), job_id=UUID(found[2]))
        except OverflowError:
            return None

    def __str__(self) -> str:
        """Returns it as readers of pages send it back."""
        return f"{(self.at - EPOCH) // timedelta(microseconds=1)}-{self.job_id}"


def list_jobs(
    connection: Connection,
    *,
    state: JobState | None = None,
    model: str | None = None,
    tenant: str | None = None,
    limit: int = 100,
    after: UUID | PageEnd | None = None,
) -> list[JobSummary]:
    """Newest first, at most `limit`; `after` is the end of the page before, or its last id. Without
    `tenant` those of all. Raises Invalid."""
    end = _end(connection, "created_at", after, tenant)
    rules = "" if model is None else "AND model = :model"
    rules += "" if after is None else " AND (created_at, id) < (:last_at, :after)"
    limit = min(limit, MAX_LISTED)
    if tenant is None and state is None and model is None:
        rows = f"SELECT created_at, id FROM jobs WHERE true {rules}"  # noqa: S608 (constants)
    else:
        rows = WALKS.format(rules=rules, limit=limit)
    values = {
        "tenant": tenant,
        "model": model,
        "states": list(JobState) if state is None else [state],
    }
    return _summaries(connection, _page(rows, "created_at", limit), {**values, **_bounds(end)})


def list_dead(
    connection: Connection, *, model: str | None = None, limit: int = 100, after: UUID | None = None
) -> list[JobSummary]:
    """Dead letters, the newest end first, at most `limit`; `after` is the last id of the page
    before. Raises Invalid."""
    end = _end(connection, "finished_at", after, None)
    rules = "" if model is None else "AND model = :model"
    rules += "" if after is None else " AND (finished_at, id) < (:last_at, :after)"
    rows = f"SELECT finished_at, id FROM jobs WHERE {DEAD} {rules}"  # noqa: S608 (constants)
    query = _page(rows, "finished_at", min(limit, MAX_LISTED))
    return _summaries(connection, query, {"model": model, **_bounds(end)})


def _page(rows: str, column: str, limit: int) -> TextClause:
    sizes = {"max_prompt_chars": MAX_PROMPT_CHARS, "max_chat_bytes": MAX_CHAT_BYTES}
    return text(PAGE.format(rows=rows, column=column, limit=limit, waits=WAITS, **sizes))


def _end(
    connection: Connection, column: str, after: UUID | PageEnd | None, tenant: str | None
) -> PageEnd | None:
    """Looks up an id; one that is not there, or another tenant's, does not tell where to go on."""
    if after is None or isinstance(after, PageEnd):
        return after
    query = select(jobs.c[column]).where(jobs.c.id == after)
    at = connection.scalar(query if tenant is None else query.where(jobs.c.tenant_id == tenant))
    if at is None:
        raise Invalid(
            "after", f"no job in this list has the id {after}; it may have been deleted", REMEDY
        )
    return PageEnd(at=at, job_id=after)


def _bounds(end: PageEnd | None) -> dict[str, Any]:
    return {} if end is None else {"last_at": end.at, "after": end.job_id}


def _summaries(
    connection: Connection, query: TextClause, values: dict[str, Any]
) -> list[JobSummary]:
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
        waits_for_parents=row.waits_for_parents,
        error=row.error,
        prompt_start=row.prompt_start,
        finish_reason=FinishReason(row.finish_reason) if has_result else None,
        usage=_usage(row) if has_result else None,
    )


def _usage(row: Row[Any]) -> Usage:
    return Usage(
        prompt_tokens=row.prompt_tokens,
        completion_tokens=row.completion_tokens,
        cached_tokens=row.cached_tokens,
        reasoning_tokens=row.reasoning_tokens,
    )
