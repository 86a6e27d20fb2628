"""Tasks of the Celery door: the job of each one, what follows its end, and which relay settles it.
Knows no Celery.

A task is settled once its result is stored and its callbacks are sent. A relay that settles one
puts its `due_at` off; if it dies, the task is due again then. Several tasks may have one job.
Locks: `store` a row of `jobs`, then one of `celery_tasks`; `expire` rows of `jobs` with SKIP
LOCKED, then theirs here; `lend` rows here with SKIP LOCKED; the others only rows here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, text

from shardline.contract.job import JobState
from shardline.contract.tables import TASKS_CHANNEL
from shardline.store.connection.encoding import dump
from shardline.store.connection.notify import ring

MAX_BATCH = 64
MAX_REQUEST_BYTES = 1 << 20
"""Of what Celery embeds in a message."""
FORGET_S = 86_400.0
"""After that no caller waits for a task without a job: Celery itself keeps results for a day."""

STORE = text("""
-- Its job, which cannot end before this commits: the trigger would pass over a task that it does
-- not see.
WITH job AS (
    SELECT id, finished_at FROM jobs WHERE id = :job_id FOR NO KEY UPDATE
)
INSERT INTO celery_tasks (task_id, job_id, request, error, expires_at, due_at)
SELECT :task_id, job.id, :request, CAST(:error AS jsonb), now() + make_interval(secs => :expires_s),
    CASE WHEN job.id IS NULL OR job.finished_at IS NOT NULL THEN now() END
FROM (SELECT 1) AS one LEFT JOIN job ON true
-- What came before is the same task again, unless it is a revoke that overtook it.
ON CONFLICT (task_id) DO UPDATE SET job_id = excluded.job_id, request = excluded.request,
    error = excluded.error, expires_at = excluded.expires_at, due_at = excluded.due_at
WHERE celery_tasks.revoked_at IS NOT NULL
    AND celery_tasks.job_id IS NULL AND celery_tasks.error IS NULL
RETURNING revoked_at
""")

AGAIN = text("""
UPDATE celery_tasks SET settled_at = NULL, due_at = now(), request = :request, num_failures = 0
WHERE task_id = :task_id AND job_id = :job_id AND settled_at IS NOT NULL
    AND EXISTS (SELECT FROM jobs WHERE id = :job_id AND finished_at IS NOT NULL)
""")

EMBEDDED = ("callbacks", "errbacks", "chain", "chord")
"""What Celery's request says of others that follow or count the task."""

REVOKE = text("""
INSERT INTO celery_tasks (task_id, revoked_at)
SELECT unnest(CAST(:ids AS text[])), now()
ON CONFLICT DO NOTHING
""")

JOBS_OF = text(
    "SELECT task_id, job_id FROM celery_tasks WHERE task_id = ANY(CAST(:ids AS text[])) "
    "AND job_id IS NOT NULL"
)

FORGET_REVOKES = text("""
DELETE FROM celery_tasks
WHERE task_id = ANY(CAST(:ids AS text[]))
    AND job_id IS NULL AND error IS NULL AND settled_at IS NULL
""")

WITH_TASKS = text(
    "SELECT DISTINCT job_id FROM celery_tasks WHERE job_id = ANY(CAST(:ids AS uuid[]))"
)

LEND = text("""
-- The longest due that no other relay is taking.
WITH due AS (
    SELECT task_id FROM celery_tasks WHERE due_at <= now()
    ORDER BY due_at LIMIT :max_batch FOR UPDATE SKIP LOCKED
),
-- Ours for a while.
lent AS (
    UPDATE celery_tasks SET due_at = now() + make_interval(secs => :lease_s)
    FROM due WHERE celery_tasks.task_id = due.task_id
    RETURNING celery_tasks.task_id, job_id, request, celery_tasks.error, num_failures, created_at
)
SELECT lent.task_id, lent.job_id, lent.request,
    coalesce(lent.error, jobs.error) AS error, lent.num_failures,
    coalesce(jobs.state, 'failed') AS state,
    extract(epoch FROM now() - coalesce(jobs.finished_at, lent.created_at))::float8 AS age_s,
    results.text, results.token_ids, results.finish_reason,
    results.prompt_tokens, results.completion_tokens, results.reasoning, results.tool_calls,
    CASE WHEN results.choice IS NOT NULL THEN jsonb_build_object(
        'choice', results.choice, 'probability', results.probability,
        'confidence', results.confidence, 'score', results.score,
        'probabilities', results.probabilities, 'label_mass', results.label_mass) END AS decision,
    results.embedding, CASE WHEN results.choice IS NULL THEN results.score END AS score
FROM lent LEFT JOIN jobs ON jobs.id = lent.job_id LEFT JOIN results ON results.job_id = lent.job_id
ORDER BY coalesce(jobs.finished_at, lent.created_at), lent.task_id
""")

SETTLE = text("""
UPDATE celery_tasks SET settled_at = now(), due_at = NULL, expires_at = NULL,
    request = NULL, error = NULL
WHERE task_id = ANY(CAST(:ids AS text[]))
""")

PUT_OFF = text("""
UPDATE celery_tasks SET due_at = now() + make_interval(secs => :pause_s),
    num_failures = num_failures + :num_failures
WHERE task_id = ANY(CAST(:ids AS text[])) AND settled_at IS NULL
""")

EXPIRE = text("""
-- Tasks after their time to begin, with jobs that never began: a sweep ends these. Locked jobs
-- are passed over one by one, in the order of times: they have their turn later, and fill no batch.
WITH waiting AS (
    SELECT task_id, id FROM (
        SELECT task_id, job_id FROM celery_tasks WHERE expires_at <= now() ORDER BY expires_at
    ) AS late
    CROSS JOIN LATERAL (
        SELECT id FROM jobs WHERE id = late.job_id AND state = 'queued' AND fence = 0
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS job
    LIMIT :max_batch
),
-- Those with jobs that began, or without one. A subquery, not a join: it reads one job for each.
over AS (
    SELECT task_id FROM celery_tasks
    WHERE expires_at <= now()
        AND (SELECT state = 'queued' AND fence = 0 FROM jobs
            WHERE jobs.id = celery_tasks.job_id) IS NOT TRUE
    ORDER BY expires_at LIMIT :max_batch FOR UPDATE SKIP LOCKED
),
-- As if they had a deadline, which is now.
ended AS (
    UPDATE jobs SET deadline_at = least(deadline_at, now()) FROM waiting
    WHERE jobs.id = waiting.id AND state = 'queued' AND fence = 0
)
UPDATE celery_tasks SET expires_at = NULL
FROM (SELECT task_id FROM waiting UNION ALL SELECT task_id FROM over) AS late
WHERE celery_tasks.task_id = late.task_id
""")

FORGET = text("""
DELETE FROM celery_tasks WHERE task_id IN (
    SELECT task_id FROM celery_tasks
    WHERE job_id IS NULL AND created_at < now() - make_interval(secs => :age_s)
    ORDER BY created_at LIMIT :max_batch
)
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class CeleryTask:
    """A task as it arrived. `request` is JSON that the relay reads again when the task is
    settled."""

    task_id: str
    request: str
    expires_s: float | None = None
    """Its job may begin within this many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedTask:
    """A task that can have no job, or has an ended one. `text` and what follows are None without a
    result."""

    task_id: str
    job_id: UUID | None
    request: str | None
    """None: it was revoked before it came, and never came."""
    state: JobState
    error: Mapping[str, Any] | None
    age_s: float
    """Since the end."""
    num_failures: int
    text: str | None
    token_ids: Sequence[int] | None
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    reasoning: str | None = None
    tool_calls: Sequence[Mapping[str, Any]] | None = None
    decision: Mapping[str, Any] | None = None
    embedding: Sequence[float] | None = None
    score: float | None = None


def store(
    connection: Connection,
    task: CeleryTask,
    *,
    job_id: UUID | None,
    error: Mapping[str, Any] | None = None,
) -> datetime | None:
    """Store a task with its job, or with the reason why it has none. A repeat changes nothing,
    unless the task is settled: its result is due again, which a backend may have forgotten. What
    follows it is not sent again.

    Returns when the task was revoked, if that was before it came.
    """
    values = {
        "task_id": task.task_id,
        "job_id": job_id,
        "request": task.request,
        "error": None if error is None else dump(error),
        "expires_s": task.expires_s,
    }
    row = connection.execute(STORE, values).first()
    if row is None and job_id is not None:
        again = {"task_id": task.task_id, "job_id": job_id, "request": _alone(task.request)}
        connection.execute(AGAIN, again)
    if row is not None and job_id is None:
        ring(connection, TASKS_CHANNEL)
    return None if row is None else row.revoked_at


def _alone(request: str) -> str:
    """Returns a request without what follows its task."""
    kept = json.loads(request)
    return json.dumps({name: value for name, value in kept.items() if name not in EMBEDDED})


def revoke(connection: Connection, task_ids: Collection[str]) -> dict[str, UUID]:
    """The jobs of those that are here; the others will be revoked when they come."""
    # In one order for everybody: an insert waits for an open transaction with the same id.
    connection.execute(REVOKE, {"ids": sorted(task_ids)})
    return {row.task_id: row.job_id for row in connection.execute(JOBS_OF, {"ids": list(task_ids)})}


def forget_revokes(connection: Connection, task_ids: Collection[str]) -> None:
    """They name jobs of other doors, and were cancelled as such."""
    connection.execute(FORGET_REVOKES, {"ids": list(task_ids)})


def with_tasks(connection: Connection, job_ids: Collection[UUID]) -> set[UUID]:
    """Returns those jobs with results that relays report under the ids of Celery tasks."""
    return set(connection.scalars(WITH_TASKS, {"ids": list(job_ids)}))


def lend(connection: Connection, *, lease_s: float, max_batch: int = MAX_BATCH) -> list[EndedTask]:
    """Tasks that are due, the oldest ends first; ours for `lease_s` once the caller commits."""
    rows = connection.execute(LEND, {"lease_s": lease_s, "max_batch": max_batch}).mappings()
    return [EndedTask(**{**row, "state": JobState(row["state"])}) for row in rows]


def settle(connection: Connection, task_ids: Collection[str]) -> None:
    """Nothing is left to do for them."""
    connection.execute(SETTLE, {"ids": list(task_ids)})


def put_off(
    connection: Connection, task_ids: Collection[str], *, pause_s: float, num_failures: int
) -> None:
    """They are due again after `pause_s`; `num_failures` are added to theirs."""
    connection.execute(
        PUT_OFF, {"ids": list(task_ids), "pause_s": pause_s, "num_failures": num_failures}
    )


def expire(connection: Connection, *, max_batch: int = MAX_BATCH) -> int:
    """Jobs that did not begin by their tasks' `expires` never will: the next sweep ends them as
    expired. Returns how many tasks were looked at, without those of locked jobs; with `max_batch`
    there may be more."""
    return min(connection.execute(EXPIRE, {"max_batch": max_batch}).rowcount, max_batch)


def forget(connection: Connection, *, max_batch: int = MAX_BATCH) -> int:
    """Delete tasks without a job after FORGET_S: revokes of what never came, and requests that no
    row could hold."""
    return connection.execute(FORGET, {"age_s": FORGET_S, "max_batch": max_batch}).rowcount
