"""Rows of `batch_lines`: inserted with their jobs, counted, read in pages as they end. Knows no
form of an answer.

Locks: the row of the batch, then rows of `jobs` that are inserted or cancelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, text

from shardline.base.errors import ShardlineError
from shardline.contract.batches.batch import LineCounts
from shardline.store.batches import LEASE_S, BatchRow, TurnLost
from shardline.store.connection.encoding import dump
from shardline.store.inserts import EncodedRequest
from shardline.store.jobs import request_cancel
from shardline.store.responses import insert_with_responses

MAX_CANCELLED = 1_000
"""Jobs that one transaction cancels."""

ADVANCE = text(f"""
UPDATE batches SET next_line = :next_line, next_byte = :next_byte,
    due_at = now() + make_interval(secs => {LEASE_S})
WHERE id = :id AND fence = :fence AND next_line = :was RETURNING id
""")  # noqa: S608 (a constant of ours)
INSERT = text("""
INSERT INTO batch_lines (batch_id, line, custom_id, job_id, num_jobs, num_choices, options, error)
SELECT :id, line, custom_id, job_id, num_jobs, num_choices, options, error
FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS new(
    line int, custom_id text, job_id uuid, num_jobs smallint, num_choices smallint, options jsonb,
    error jsonb)
""")

# Of a line `l` with its first job `j`: one that is gone was never seen to succeed.
OTHERS = "SELECT FROM jobs AS others WHERE l.num_jobs > 1 AND others.choice_of = l.job_id"
IS_OPEN = f"""(coalesce(j.state IN ('queued', 'running'), false)
    OR EXISTS ({OTHERS} AND others.state IN ('queued', 'running')))"""
HAS_SUCCEEDED = f"""(coalesce(j.state = 'succeeded', false)
    AND NOT EXISTS ({OTHERS} AND others.state <> 'succeeded'))"""

COUNT = text(f"""
-- The lines that are not settled, each with what became of it.
WITH lines AS MATERIALIZED (
    SELECT l.line, l.job_id, l.num_jobs, l.num_choices, {IS_OPEN} AS is_open,
        {HAS_SUCCEEDED} AS has_succeeded,
        coalesce(j.state = 'expired', l.error ->> 'code' = 'batch_expired', false) AS has_expired
    FROM batch_lines AS l LEFT JOIN jobs AS j ON j.id = l.job_id
    WHERE l.batch_id = :id AND l.line >= :first_open
),
-- The first one that has not ended.
open AS (SELECT min(line) FILTER (WHERE is_open) AS line FROM lines),
-- The tokens of those that have succeeded: of several choices the prompt counts once.
used AS (
    SELECT lines.line, usage.* FROM lines CROSS JOIN LATERAL (
        SELECT
            sum(prompt_tokens) FILTER (WHERE is_first) AS prompt_tokens,
            sum(cached_tokens) FILTER (WHERE is_first) AS cached_tokens,
            sum(completion_tokens) AS completion_tokens,
            sum(reasoning_tokens) AS reasoning_tokens
        FROM (
            SELECT results.*, true AS is_first FROM results WHERE results.job_id = lines.job_id
            UNION ALL
            SELECT results.*, jobs.choice_index % lines.num_choices = 0
            FROM jobs JOIN results ON results.job_id = jobs.id
            WHERE lines.num_jobs > 1 AND jobs.choice_of = lines.job_id AND jobs.choice_index > 0
        ) AS each
    ) AS usage
    WHERE lines.has_succeeded
)
SELECT is_settled, count(*) FILTER (WHERE has_succeeded) AS completed,
    count(*) FILTER (WHERE NOT is_open AND NOT has_succeeded) AS failed,
    count(*) FILTER (WHERE NOT is_open AND NOT has_succeeded AND has_expired) AS expired,
    coalesce(sum(prompt_tokens), 0)::bigint AS prompt_tokens,
    coalesce(sum(cached_tokens), 0)::bigint AS cached_tokens,
    coalesce(sum(completion_tokens), 0)::bigint AS completion_tokens,
    coalesce(sum(reasoning_tokens), 0)::bigint AS reasoning_tokens,
    max(open.line) AS open_line
FROM lines LEFT JOIN used USING (line) CROSS JOIN open
CROSS JOIN LATERAL (SELECT open.line IS NULL OR lines.line < open.line AS is_settled) AS place
GROUP BY is_settled
""")  # noqa: S608 (constants of ours)

PAGE = """
SELECT l.line, l.custom_id, l.job_id, l.num_jobs, l.num_choices, l.options, l.error
FROM batch_lines AS l LEFT JOIN jobs AS j ON j.id = l.job_id
WHERE l.batch_id = :id AND l.line > :after AND NOT {is_open} AND {has_succeeded}
ORDER BY l.line LIMIT {limit}
"""
UNASKED = text(f"""
-- The jobs of its lines from the first open one on, in the order of lines.
WITH asked AS (
    SELECT line, job_id AS id FROM batch_lines
    WHERE batch_id = :id AND line >= :first_open AND job_id IS NOT NULL
    UNION ALL
    SELECT line, jobs.id FROM batch_lines JOIN jobs ON jobs.choice_of = batch_lines.job_id
    WHERE batch_id = :id AND line >= :first_open AND num_jobs > 1 AND jobs.choice_index > 0
)
SELECT jobs.id FROM asked JOIN jobs USING (id)
WHERE jobs.state IN ('queued', 'running') AND jobs.cancel_requested_at IS NULL
ORDER BY line LIMIT {MAX_CANCELLED}
""")  # noqa: S608 (a constant of ours)


class RefusedLines(Exception):
    """Some requests can have no jobs; nothing was inserted. `errors` are by the lines' numbers."""

    def __init__(self, errors: Mapping[int, ShardlineError]) -> None:
        super().__init__(f"{len(errors)} lines are refused")
        self.errors = errors


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLine:
    """A line of a batch's file: with the request that it became, or an error as the file of errors
    has it."""

    line: int
    custom_id: str | None
    request: EncodedRequest | None = None
    num_choices: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    error: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRow:
    """A line that has ended."""

    line: int
    custom_id: str | None
    job_id: UUID | None
    num_jobs: int
    num_choices: int
    options: Mapping[str, Any]
    error: Mapping[str, Any] | None


def add_lines(
    connection: Connection, batch: BatchRow, lines: Sequence[NewLine], *, next_byte: int
) -> None:
    """Inserts the next lines with their jobs, and where the file goes on. Raises TurnLost,
    RefusedLines, and Invalid for a row against a rule of the table: then the caller's transaction
    must not be committed."""
    turn = {"id": batch.id, "fence": batch.fence, "was": batch.next_line}
    place = {"next_line": lines[-1].line + 1, "next_byte": next_byte}
    if connection.scalar(ADVANCE, {**turn, **place}) is None:
        raise TurnLost
    asked = [
        (one, replace(one.request, key_name=batch.key_name))
        for one in lines
        if one.request is not None
    ]
    outcomes = insert_with_responses(connection, [request for _, request in asked])
    refused = {
        one.line: outcome
        for (one, _), outcome in zip(asked, outcomes, strict=True)
        if isinstance(outcome, ShardlineError)
    }
    if refused:
        raise RefusedLines(refused)
    rows = [
        {
            "line": one.line,
            "custom_id": one.custom_id,
            "job_id": None if one.request is None else one.request.job_id,
            "num_jobs": 0 if one.request is None else 1 + len(one.request.others),
            "num_choices": one.num_choices,
            "options": one.options,
            "error": one.error,
        }
        for one in lines
    ]
    connection.execute(INSERT, {"id": batch.id, "rows": dump(rows)})


def count_lines(connection: Connection, batch: BatchRow) -> tuple[LineCounts, LineCounts, int]:
    """Returns what is settled now, all that has ended, and the first line that has not: where all
    have, the one behind them."""
    wanted = {"id": batch.id, "first_open": batch.first_open}
    settled = counts = batch.settled
    first_open = batch.next_line
    for row in connection.execute(COUNT, wanted).mappings():
        counts = _sum(counts, dict(row))
        if row["is_settled"]:
            settled = _sum(settled, dict(row))
        if row["open_line"] is not None:
            first_open = row["open_line"]
    return settled, counts, first_open


def ended_lines(
    connection: Connection, batch_id: UUID, *, after: int, limit: int, has_succeeded: bool
) -> list[LineRow]:
    """The next lines behind one that have ended, and have succeeded or have not."""
    rule = HAS_SUCCEEDED if has_succeeded else f"NOT {HAS_SUCCEEDED}"
    query = text(PAGE.format(is_open=IS_OPEN, has_succeeded=rule, limit=limit))
    rows = connection.execute(query, {"id": batch_id, "after": after}).mappings()
    return [LineRow(**row) for row in rows]


def cancel_lines(connection: Connection, batch: BatchRow) -> bool:
    """Asks for the end of jobs of a batch. Returns whether there may be more of them."""
    wanted = {"id": batch.id, "first_open": batch.first_open}
    ids = list(connection.scalars(UNASKED, wanted))
    request_cancel(connection, ids)
    return len(ids) == MAX_CANCELLED


def _sum(counts: LineCounts, row: Mapping[str, Any]) -> LineCounts:
    return LineCounts(
        **{name: getattr(counts, name) + row[name] for name in LineCounts.__struct_fields__}
    )
