"""What Postgres has of the output of jobs, read in pages by those who follow their streams. Knows
no reader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection, Row, text

from shardline.contract.job import PROMPT_END_TOKENS, FinishReason, JobProgress, JobState
from shardline.store.connection.encoding import dump, load_logprobs, readable_params

MAX_TOKENS = 4_096
"""Of one job in one reading: with 20 log-probabilities each, about 4 MB."""

PROGRESS = text("""
-- What each reader asks for: `same_start` counts while the attempt is the one that it knows.
WITH asked AS (
    SELECT * FROM ROWS FROM (jsonb_to_recordset(CAST(:asked AS jsonb))
        AS (job_id uuid, fence bigint, same_start int, other_start int, with_prompt_end bool))
        WITH ORDINALITY
        AS asked(job_id, fence, same_start, other_start, with_prompt_end, number)
),
-- The result's tokens once there is one, else those that the newest attempt has saved.
found AS (
    SELECT asked.number, jobs.state, jobs.fence, jobs.params, jobs.max_tokens,
        results.text, results.finish_reason,
        CASE WHEN with_prompt_end
            THEN jobs.prompt_ids[cardinality(jobs.prompt_ids) - :num_prompt_end + 1 :] END
            AS prompt_end,
        CASE WHEN jobs.fence = asked.fence THEN same_start ELSE other_start END AS start,
        CASE WHEN results.job_id IS NULL
            THEN coalesce(attempts.tokens, '{}') ELSE results.token_ids END AS tokens,
        CASE WHEN results.job_id IS NULL
            THEN attempts.logprobs ELSE results.logprobs END AS logprobs
    FROM asked JOIN jobs ON jobs.id = asked.job_id
    LEFT JOIN attempts ON attempts.job_id = jobs.id AND attempts.fence = jobs.fence
    LEFT JOIN results ON results.job_id = jobs.id
)
SELECT number, state, fence, params, max_tokens, finish_reason, start, prompt_end,
    tokens[start + 1 : start + :max_tokens_read] AS tokens,
    cardinality(tokens) <= start + :max_tokens_read AS is_whole,
    CASE WHEN cardinality(tokens) <= start + :max_tokens_read THEN text END AS text,
    CASE WHEN cardinality(tokens) > start THEN jsonb_path_query_array(
        logprobs, '$[$first to $last]',
        jsonb_build_object('first', start, 'last', start + :max_tokens_read - 1)) END AS logprobs
FROM found
""")


class ProgressQuestion(NamedTuple):
    """Output tokens from `same_start` on while `fence` is the newest attempt's, else from
    `other_start` on."""

    job_id: UUID
    fence: int = 0
    same_start: int = 0
    other_start: int = 0
    with_prompt_end: bool = False


def read_progress(
    connection: Connection, asked: Sequence[ProgressQuestion]
) -> list[JobProgress | None]:
    """Reads them in the order of `asked`; None where there is no such job."""
    found: list[JobProgress | None] = [None] * len(asked)
    values = {
        "asked": dump([one._asdict() for one in asked]),
        "max_tokens_read": MAX_TOKENS,
        "num_prompt_end": PROMPT_END_TOKENS,
    }
    for row in connection.execute(PROGRESS, values):
        found[row.number - 1] = _load(row)
    return found


def _load(row: Row[tuple[object, ...]]) -> JobProgress:
    state = JobState(row.state)
    is_over = state.terminal and row.is_whole
    return JobProgress(
        state=state if is_over else None,
        is_whole=row.is_whole,
        fence=row.fence,
        start=row.start,
        token_ids=tuple(row.tokens),
        logprobs=load_logprobs(row.logprobs),
        text=row.text,
        finish_reason=FinishReason(row.finish_reason) if is_over and row.finish_reason else None,
        params=readable_params(row.params),
        max_tokens=row.max_tokens,
        prompt_end=tuple(row.prompt_end or ()),
    )
