"""Dead letters: jobs that `failed` because their crashes were used up. Shows their attempts,
replays them.

Knows no relay: the sweep that makes a job a dead letter is in `sweeps`, their lists are in
`listing`.
"""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import msgspec
from sqlalchemy import Connection, func, select, text
from sqlalchemy.exc import IntegrityError

from shardline.base.errors import Conflict, Invalid, NotFound
from shardline.contract.ids import new_id
from shardline.contract.job import Job
from shardline.contract.tables import DEAD, attempts, jobs
from shardline.store.jobs import get_job
from shardline.store.listing import MAX_LISTED
from shardline.store.row_inserts import invalid_row

MAX_ATTEMPTS = 100
"""Shown of one job, the newest."""

CRASHED = "crashed"
"""The code in `error`."""

COPIED = """tenant_id, model, prompt, messages, prompt_ids, params, seed, priority, metadata,
    max_crashes, retry, depends_on, on_parent_failure, replay_of"""
# Text is tokenized again by a relay: the model may have another tokenizer by now. Given ids are the
# prompt itself.
COPIES = """tenant_id, model, prompt, messages,
    CASE WHEN num_nonnulls(prompt, messages) = 0 THEN prompt_ids END, params, seed, priority,
    metadata, max_crashes, retry, depends_on, on_parent_failure, jobs.id"""
"""The columns that a job has of the one that it replays, and what they have in it."""

HAS_ITS_PARENTS = """(jobs.depends_on IS NULL OR NOT EXISTS (
    SELECT FROM jsonb_array_elements(jobs.depends_on) AS one
    WHERE NOT EXISTS (
        SELECT FROM jobs AS parents
        WHERE parents.id = CAST(one ->> 'job' AS uuid) AND parents.tenant_id = jobs.tenant_id)))"""
"""Without one of them, which retention may have deleted, a copy is refused, with all others of its
statement: as `shardline_join_parents` has it."""

REPLAY = text(f"""
INSERT INTO jobs ({COPIED}, id, idempotency_key)
SELECT {COPIES}, :id, :idempotency_key
FROM jobs WHERE jobs.id = :dead_id AND {DEAD}
ON CONFLICT DO NOTHING RETURNING id
""")  # noqa: S608 (constants of ours)


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One claim of a job: who had it, when, and how it ended."""

    fence: int
    pipeline: str
    epoch: int
    worker: str
    started_at: datetime
    heartbeat_at: datetime
    """The last sign of life."""
    ended_at: datetime | None
    outcome: str | None
    num_resumed: int
    """Tokens that earlier attempts had saved."""
    num_tokens: int
    """Tokens saved when it ended."""


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """The job, its attempts (the newest first) and the jobs that replay it."""

    job: Job
    attempts: tuple[Attempt, ...]
    replays: tuple[UUID, ...]


def get_dead(connection: Connection, job_id: UUID) -> DeadLetter:
    """Raises NotFound, and Invalid for a job that is no dead letter."""
    job = _checked(connection, job_id)
    columns = [attempts.c[name] for name in Attempt.__struct_fields__ if name != "num_tokens"]
    history = (
        select(*columns, func.cardinality(attempts.c.tokens).label("num_tokens"))
        .where(attempts.c.job_id == job_id)
        .order_by(attempts.c.fence.desc())
        .limit(MAX_ATTEMPTS)
    )
    replays = (
        select(jobs.c.id)
        .where(jobs.c.replay_of == job_id)
        .order_by(jobs.c.created_at)
        .limit(MAX_LISTED)
    )
    return DeadLetter(
        job=job,
        attempts=tuple(Attempt(**row) for row in connection.execute(history).mappings()),
        replays=tuple(connection.scalars(replays)),
    )


def replay(connection: Connection, job_id: UUID, *, idempotency_key: str | None = None) -> UUID:
    """A new job with the same prompt, parameters and seed, and `replay_of`; accepted once the
    caller commits. With a key, a repeat returns the replay that has it. Raises NotFound, Invalid
    (also where a parent was deleted), and Conflict for a key of another job."""
    dead = _checked(connection, job_id)
    if idempotency_key is not None and not 1 <= len(idempotency_key) <= 256:
        raise Invalid(
            "idempotency_key",
            "it must have 1 to 256 characters",
            "Send another one, or leave it out",
        )
    values = {"id": new_id(), "dead_id": job_id, "idempotency_key": idempotency_key}
    try:
        inserted: UUID | None = connection.scalar(REPLAY, values)
    except IntegrityError as error:
        raise invalid_row(error) from error
    if inserted is not None:
        return inserted
    same_key = (jobs.c.tenant_id == dead.tenant) & (jobs.c.idempotency_key == idempotency_key)
    first = connection.execute(select(jobs.c.id, jobs.c.replay_of).where(same_key)).one_or_none()
    if first is None or first.replay_of != job_id:
        raise Conflict(
            f"another job than a replay of {job_id} has this idempotency key; use a new one"
        )
    return UUID(str(first.id))


def _checked(connection: Connection, job_id: UUID) -> Job:
    job = get_job(connection, job_id)
    if job is None:
        raise NotFound(f"no job has the id {job_id}")
    code = (job.error or {}).get("code")
    if code != CRASHED:
        state = f"{job.state}, code {code}" if code else job.state
        problem = f"{job_id} is no dead letter but {state}"
        raise Invalid(
            "job",
            problem,
            f"Only jobs that failed with code {CRASHED} are; submit others as new jobs",
        )
    return job
