"""Jobs that wait for others: released once these have ended, with the texts of these. Knows no
tokenizer.

A parent's end makes its rows in `parents_of_jobs` due, in its own transaction, and so does the
insert of a child. What is due is looked at under the locks of child and parent. An end that comes
later finds the row open; one under way has the parent locked, and the row stays due: none is
missed. A kill in between changes nothing: a look is one transaction.
Locks: the advisory lock LOCK, then rows of `jobs` with SKIP LOCKED, so in any order.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text

from shardline.contract.job import PROMPT_END_TOKENS, SamplingParams, address_of
from shardline.contract.parents.parent_job import FIELD, MAX_FILLED_CHARS
from shardline.store.connection.encoding import readable_params

CODE = "parent_failed"
"""In the error of a job."""

MAX_BATCH = 256

LOCK = 7_305_793_414
"""Advisory lock of a transaction: of two that look at the parents of one job at once, neither would
see that the other's was the last."""

# No row, and no lock, while there is nothing to look at.
TRY_LOCK = text(f"""
SELECT pg_try_advisory_xact_lock({LOCK}) WHERE EXISTS (
    SELECT FROM parents_of_jobs WHERE state = 'due')
""")  # noqa: S608 (a constant of ours)

LOOK = text(f"""
-- What has to be looked at.
WITH due AS MATERIALIZED (
    SELECT job_id, parent_id FROM parents_of_jobs
    WHERE state = 'due' ORDER BY job_id LIMIT {MAX_BATCH}
),
-- Children too: they are released in this transaction. What somebody else has locked has its turn
-- the next time.
locked AS MATERIALIZED (
    SELECT id, state FROM jobs
    WHERE id = ANY(ARRAY(SELECT job_id FROM due UNION SELECT parent_id FROM due))
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE parents_of_jobs SET state = CASE parents.state
    WHEN 'queued' THEN 'open' WHEN 'running' THEN 'open' WHEN 'succeeded' THEN 'succeeded'
    ELSE 'failed' END
FROM due JOIN locked AS children ON children.id = due.job_id
LEFT JOIN locked AS parents ON parents.id = due.parent_id
WHERE parents_of_jobs.job_id = due.job_id AND parents_of_jobs.parent_id = due.parent_id
    -- Without a row it was deleted. By OFFSET each is asked for by itself.
    AND (parents.id IS NOT NULL OR NOT EXISTS (
        SELECT FROM jobs WHERE id = due.parent_id OFFSET 0))
RETURNING parents_of_jobs.job_id
""")  # noqa: S608 (a constant of ours)

RELEASE = text("""
UPDATE jobs SET released_at = now(), not_before = greatest(not_before, now())
WHERE id = ANY(CAST(:ids AS uuid[])) AND state = 'queued' AND released_at IS NULL
    AND (
        NOT EXISTS (
            SELECT FROM parents_of_jobs
            WHERE job_id = jobs.id AND parents_of_jobs.state IN ('due', 'open'))
        OR on_parent_failure = 'fail' AND EXISTS (
            SELECT FROM parents_of_jobs
            WHERE job_id = jobs.id AND parents_of_jobs.state = 'failed'))
RETURNING id
""")

# Of a job that fails with its parents.
FAILED = text("""
SELECT parents_of_jobs.parent_id, coalesce(parents.state, 'deleted') AS state
FROM jobs JOIN parents_of_jobs ON parents_of_jobs.job_id = jobs.id
    LEFT JOIN jobs AS parents ON parents.id = parents_of_jobs.parent_id
WHERE jobs.id = :job_id AND jobs.on_parent_failure = 'fail' AND parents_of_jobs.state = 'failed'
ORDER BY parents_of_jobs.parent_id LIMIT 1
""")

TEXTS = text(f"""
-- Their size, which is known without reading a text.
WITH made AS MATERIALIZED (
    SELECT sum(octet_length(text)) AS num_bytes FROM results
    WHERE job_id = ANY(CAST(:ids AS uuid[]))
)
SELECT jobs.id, jobs.model, jobs.params, jobs.messages IS NOT NULL AS is_chat,
    jobs.prompt_ids[cardinality(jobs.prompt_ids) - {PROMPT_END_TOKENS} + 1 :] AS prompt_end,
    coalesce(results.choice, CASE WHEN made.num_bytes <= {MAX_FILLED_CHARS} THEN results.text END)
        AS text
FROM made CROSS JOIN jobs JOIN results ON results.job_id = jobs.id
WHERE jobs.id = ANY(CAST(:ids AS uuid[])) AND results.job_id = ANY(CAST(:ids AS uuid[]))
    -- Whatever a hand has written into its row since: these were seen to be its tenant's.
    AND EXISTS (
        SELECT FROM parents_of_jobs
        WHERE parents_of_jobs.job_id = :job_id AND parent_id = jobs.id
            AND parents_of_jobs.state = 'succeeded' OFFSET 0)
""")  # noqa: S608 (constants of ours)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentText:
    """What a parent has made."""

    job_id: UUID
    address: str
    """Of its model."""
    params: SamplingParams
    is_chat: bool
    prompt_end: tuple[int, ...]
    """Its prompt's last tokens."""
    text: str | None
    """As generated; of a question its choice. None: with the others it is too long."""


def release(connection: Connection) -> bool:
    """Looks at parents that are due, and lets those jobs be prepared that need to wait no more.
    Returns whether there may be more to do at once."""
    if not connection.scalar(TRY_LOCK):
        return False
    seen = list(connection.scalars(LOOK))
    if seen:
        connection.execute(RELEASE, {"ids": list(set(seen))})
    return len(seen) == MAX_BATCH


def failure(connection: Connection, job_id: UUID) -> dict[str, str] | None:
    """Returns the error of a job that fails because a parent did not succeed; None: it runs."""
    failed = connection.execute(FAILED, {"job_id": job_id}).one_or_none()
    if failed is None:
        return None
    return {
        "code": CODE,
        "field": FIELD,
        "problem": f"job {failed.parent_id} did not succeed: it is {failed.state}",
        "remedy": "Send it and this one again, or this one with on_parent_failure run",
        "parent": str(failed.parent_id),
    }


def parent_texts(connection: Connection, job_id: UUID, ids: Collection[UUID]) -> list[ParentText]:
    """Reads those of these parents of a job that succeeded."""
    rows = connection.execute(TEXTS, {"job_id": job_id, "ids": list(ids)}) if ids else ()
    return [_text(row) for row in rows]


def _text(row: Row[Any]) -> ParentText:
    params = readable_params(row.params)
    return ParentText(
        job_id=row.id,
        address=address_of(row.model, params.adapter),
        params=params,
        is_chat=row.is_chat,
        prompt_end=tuple(row.prompt_end or ()),
        text=row.text,
    )
