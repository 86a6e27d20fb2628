"""Deletes jobs that ended long ago, with their attempts and results, batches likewise, files that
have expired, and rows of processes that are long gone. Knows no settings: how long is the caller's.

A batch keeps its jobs as long as it is there, a job its parents while it waits for their texts.
A dead letter that was not replayed is never deleted: somebody must look at it first. Jobs are
looked at in the order in which they were created, a few at a time: what stays behind (dead letters,
a backlog that waits for longer than ended jobs are kept) is read once in each pass, and holds up no
batch.
Locks: the advisory lock LOCK, then rows of `jobs` with SKIP LOCKED, so in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from uuid import UUID

from sqlalchemy import Connection, Interval, TextClause, cast, delete, func, select, text
from sqlalchemy.exc import IntegrityError

from shardline.contract.tables import DEAD, pipeline_energy, pipelines, workers
from shardline.store.connection.database import failure_of
from shardline.store.files import IS_READ
from shardline.store.statistics import costs

MAX_BATCH = 128
MAX_FILES = 64
MAX_BATCHES = 8
MAX_READ = 1_000
"""Rows that one batch looks at."""

MAX_BYTES = 16 << 20
"""On disk, of the long values of one batch, about, and one row more: Postgres deletes them two
kilobytes at a time."""

LOCK = 7_305_793_413
"""Advisory lock of a transaction: one deletes at a time, so that two never wait for a replay of the
other."""

TRY_LOCK = text("SELECT pg_try_advisory_xact_lock(:lock)")

GONE = func.now() - cast(timedelta(days=30), Interval)
"""A worker or a pipeline without a sign for so long is not missed. One that comes back makes a new
row."""

NOTICE = "retention"

ANNOUNCE = text(f"""
-- One that the setting would delete.
WITH due AS (
    SELECT FROM jobs WHERE created_at < now() - make_interval(secs => :age_s)
        AND finished_at < now() - make_interval(secs => :age_s) AND ({DEAD}) IS NOT TRUE LIMIT 1
)
INSERT INTO notices (name) SELECT :name FROM due ON CONFLICT (name) DO NOTHING
""")  # noqa: S608 (a constant of ours)
ANNOUNCED = text(
    "SELECT extract(epoch FROM now() - made_at)::float8 FROM notices WHERE name = :name"
)

PRUNE = (
    *costs.PRUNE,
    delete(workers).where(workers.c.lease_until < GONE),
    # As long as figures of its epochs are kept it must not begin with the first one again.
    delete(pipelines).where(
        pipelines.c.lease_until < GONE,
        pipelines.c.id.not_in(select(pipeline_energy.c.pipeline)),
    ),
)

Place = tuple[datetime, UUID]
"""When a job was created, and its id: the order of jobs_listing."""

BEGINNING: Place = (datetime(1, 1, 1, tzinfo=UTC), UUID(int=0))

# No job ends before it was created.
NEXT = text(f"""
SELECT created_at, id FROM jobs
WHERE created_at < now() - make_interval(secs => :age_s)
    AND (created_at, id) > (CAST(:after_at AS timestamptz), CAST(:after_id AS uuid))
ORDER BY created_at, id LIMIT {MAX_READ}
""")  # noqa: S608 (a constant of ours)

LOCK_OLD = text(f"""
-- Those of them that may go, locked. A replay outlives what it replays, else that would look as if
-- it had none.
WITH old AS MATERIALIZED (
    SELECT * FROM jobs
    WHERE id = ANY(CAST(:ids AS uuid[])) AND finished_at < now() - make_interval(secs => :age_s)
        AND replay_of IS NULL
        AND NOT EXISTS (
            SELECT FROM batch_lines WHERE job_id = coalesce(jobs.choice_of, jobs.id))
        AND NOT EXISTS (
            SELECT FROM parents_of_jobs JOIN jobs AS children
                ON children.id = parents_of_jobs.job_id
            WHERE parents_of_jobs.parent_id = jobs.id AND children.state = 'queued'
                AND children.prepared_at IS NULL
            -- Asked of each row by itself: to join all of them would read the whole table.
            OFFSET 0)
        AND (({DEAD}) IS NOT TRUE
            OR EXISTS (SELECT FROM jobs AS replays WHERE replays.replay_of = jobs.id))
    ORDER BY created_at, id LIMIT :max_batch FOR UPDATE SKIP LOCKED
),
-- How many bytes each one has, with its result and attempts: sizes are known without
-- reading a value.
sizes AS MATERIALIZED (
    SELECT id, created_at,
        coalesce(pg_column_size(prompt), 0) + coalesce(pg_column_size(messages), 0)
        + coalesce(pg_column_size(prompt_ids), 0) + pg_column_size(metadata)
        + coalesce((
            SELECT pg_column_size(text) + pg_column_size(token_ids)
                + coalesce(pg_column_size(logprobs), 0)
                + coalesce(pg_column_size(prompt_logprobs), 0)
            FROM results WHERE job_id = old.id
        ), 0)
        + coalesce((
            SELECT sum(pg_column_size(tokens) + coalesce(pg_column_size(logprobs), 0))
            FROM attempts WHERE job_id = old.id
        ), 0)
        + coalesce((
            SELECT pg_column_size(input) + coalesce(pg_column_size(instructions), 0)
            FROM responses WHERE job_id = old.id
        ), 0) AS num_bytes
    FROM old
),
-- How many bytes the rows before each one take: the first one is in, however long it is.
totals AS (
    SELECT created_at, id,
        sum(num_bytes) OVER (ORDER BY created_at, id) - num_bytes AS num_bytes_before
    FROM sizes
)
SELECT created_at, id, num_bytes_before < :max_bytes AS fits FROM totals ORDER BY created_at, id
""")  # noqa: S608 (a constant of ours)

LOCK_FILES = text(f"""
-- Those that have expired, and uploads that ended with their gateway, locked.
WITH old AS MATERIALIZED (
    SELECT id, bytes FROM files
    WHERE (expires_at < now() AND NOT {IS_READ})
        OR (uploaded_at IS NULL AND created_at < now() - interval '1 day')
    LIMIT :max_batch FOR UPDATE SKIP LOCKED
)
-- The first one is in, however long it is.
SELECT id, sum(bytes) OVER (ORDER BY id) - bytes < :max_bytes AS fits FROM old
""")  # noqa: S608 (a constant of ours)
DELETE_FILES = text("DELETE FROM files WHERE id = ANY(CAST(:ids AS uuid[]))")

OLD_BATCHES = text(f"""
SELECT created_at, id FROM batches WHERE due_at IS NULL
    AND coalesce(completed_at, expired_at, cancelled_at, failed_at)
        < now() - make_interval(secs => :age_s)
    AND (created_at, id) > (CAST(:after_at AS timestamptz), CAST(:after_id AS uuid))
ORDER BY created_at, id LIMIT {MAX_BATCHES}
""")  # noqa: S608 (a constant of ours)
DELETE_BATCHES = text("DELETE FROM batches WHERE id = ANY(CAST(:ids AS uuid[]))")
DELETE = text("DELETE FROM jobs WHERE id = ANY(CAST(:ids AS uuid[]))")
# A foreign key that is checked at COMMIT would undo the whole batch.
CHECK_AT_ONCE = text("SET CONSTRAINTS ALL IMMEDIATE")


def announced_s(connection: Connection, *, age_s: float) -> float | None:
    """Seconds since there was a job to delete for the first time, by Postgres's clock. None: there
    never was one."""
    connection.execute(ANNOUNCE, {"name": NOTICE, "age_s": age_s})
    since_s: float | None = connection.scalar(ANNOUNCED, {"name": NOTICE})
    return since_s


def prune(connection: Connection) -> None:
    """Delete workers and pipelines that are gone, and costs that no job needs any more."""
    if connection.scalar(TRY_LOCK, {"lock": LOCK}):
        for statement in PRUNE:
            connection.execute(statement)


def prune_files(connection: Connection) -> bool:
    """Delete the next files that are not needed any more. Returns whether more may be there."""
    if not connection.scalar(TRY_LOCK, {"lock": LOCK}):
        return False
    wanted = {"max_batch": MAX_FILES, "max_bytes": MAX_BYTES}
    old = connection.execute(LOCK_FILES, wanted).all()
    fitting = [row.id for row in old if row.fits]
    if fitting:
        connection.execute(DELETE_FILES, {"ids": fitting})
    return len(fitting) < len(old) or len(old) == MAX_FILES


@dataclass(slots=True)
class KeptRows:
    """Old batches and jobs that rows of an operator's own tables refer to."""

    num: int = 0
    why: str | None = None
    """What Postgres says of one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a call of `delete_old` did."""

    num_deleted: int
    after: Place | None
    """Where the pass goes on; None when it is through."""
    kept: KeptRows = field(default_factory=KeptRows)


def delete_old(
    connection: Connection, *, age_s: float, after: Place | None = None, max_batch: int = MAX_BATCH
) -> Batch:
    """The next of those that ended more than `age_s` ago. Rows that somebody else has locked, or
    that foreign keys keep, stay until the next pass."""
    if not connection.scalar(TRY_LOCK, {"lock": LOCK}):
        return Batch(num_deleted=0, after=None)
    kept = KeptRows()
    if after is None:
        _delete_old_batches(connection, age_s, kept)
    after_at, after_id = after or BEGINNING
    read = connection.execute(
        NEXT, {"age_s": age_s, "after_at": after_at, "after_id": after_id}
    ).all()
    wanted = {"ids": [row.id for row in read], "max_batch": max_batch, "max_bytes": MAX_BYTES}
    old = connection.execute(LOCK_OLD, {"age_s": age_s, **wanted}).all() if read else []
    fitting = [row for row in old if row.fits]
    num_deleted = _delete(connection, DELETE, [row.id for row in fitting], kept)
    is_cut = len(fitting) < len(old) or len(old) == max_batch
    last = fitting[-1] if is_cut else read[-1] if len(read) == MAX_READ else None
    return Batch(
        num_deleted=num_deleted,
        after=None if last is None else (last.created_at, last.id),
        kept=kept,
    )


def _delete_old_batches(connection: Connection, age_s: float, kept: KeptRows) -> None:
    """Deletes the oldest, MAX_BATCHES or a few more; looks past those that are kept."""
    num_deleted = 0
    after_at, after_id = BEGINNING
    while num_deleted < MAX_BATCHES:
        old = connection.execute(
            OLD_BATCHES, {"age_s": age_s, "after_at": after_at, "after_id": after_id}
        ).all()
        num_deleted += _delete(connection, DELETE_BATCHES, [row.id for row in old], kept)
        if len(old) < MAX_BATCHES:
            break
        after_at, after_id = old[-1]


def _delete(
    connection: Connection, statement: TextClause, ids: Sequence[UUID], kept: KeptRows
) -> int:
    """Deletes these together, or one by one where a foreign key keeps some. Returns how many are
    gone."""
    if not ids:
        return 0
    connection.execute(CHECK_AT_ONCE)
    if _refusal(connection, statement, ids) is None:
        return len(ids)
    refusals = [_refusal(connection, statement, [row_id]) for row_id in ids]
    problems = [problem for problem in refusals if problem is not None]
    kept.num += len(problems)
    kept.why = problems[-1] if problems else kept.why
    return len(ids) - len(problems)


def _refusal(connection: Connection, statement: TextClause, ids: Sequence[UUID]) -> str | None:
    """Deletes these in a savepoint. Returns why none of them may go; None: they are gone."""
    try:
        with connection.begin_nested():
            connection.execute(statement, {"ids": ids})
    except IntegrityError as error:
        return failure_of(error).problem
    return None
