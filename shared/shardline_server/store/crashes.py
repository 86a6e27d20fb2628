"""What becomes of an attempt when its engine died: a requeue, a crash counted, or a dead letter.

Only an attempt that was computed and saved no token itself counts as a crash; one that did forgets
those before. A queued job with a crash behind it is *quarantined*: heads run it alone. Knows
neither who noticed nor why it died.
Locks: rows of `jobs`, in order of id, here or in the caller's statement, before any of their
attempts is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text

from shardline.contract.job import MAX_CRASHES, JobState
from shardline.store.connection.encoding import Key, dump_keys
from shardline_server.store.ends import End, end_running, requeue_running

MAX_HISTORY = 10

LOCK_HELD = text("""
SELECT jobs.id
FROM jobs JOIN jsonb_to_recordset(CAST(:keys AS jsonb)) AS keys(job_id uuid, fence bigint)
    ON keys.job_id = jobs.id AND keys.fence = jobs.fence
WHERE jobs.state = 'running' ORDER BY jobs.id FOR UPDATE OF jobs
""")

# In a separate statement: it must see the tokens that the last holder committed before we got the
# lock.
LAST_ATTEMPTS = text("""
SELECT jobs.id, jobs.fence, crashes, max_crashes,
    cancel_requested_at IS NOT NULL AS is_cancelled,
    coalesce(deadline_at <= now(), false) AS is_expired,
    coalesce(cardinality(tokens) > 0, false) AS has_tokens,
    coalesce(cardinality(tokens) > num_resumed, false) AS has_progress,
    coalesce(parked, false) AS parked
FROM jobs LEFT JOIN attempts ON attempts.job_id = jobs.id AND attempts.fence = jobs.fence
WHERE jobs.id = ANY(CAST(:ids AS uuid[]))
""")

QUARANTINED = text("""
SELECT id FROM jobs WHERE id = ANY(CAST(:ids AS uuid[])) AND state = 'queued' AND crashes > 0
ORDER BY priority, created_at, id
""")

HISTORY = text(f"""
SELECT fence, pipeline, worker, outcome, started_at, heartbeat_at
FROM attempts WHERE job_id = :job_id
ORDER BY fence DESC LIMIT {MAX_HISTORY}
""")  # noqa: S608 (a constant of ours)


def last_attempts(connection: Connection, ids: Sequence[UUID]) -> Iterable[Row[Any]]:
    """Locked jobs, and what their last attempts saved."""
    return connection.execute(LAST_ATTEMPTS, {"ids": ids}) if ids else ()


def quarantined(connection: Connection, ids: Collection[str]) -> list[UUID]:
    """Those that an engine died under before and that wait to run again, in their order."""
    return list(connection.scalars(QUARANTINED, {"ids": list(ids)}))


def requeue_or_fail_held(
    connection: Connection, keys: Collection[Key], *, max_crashes: int = MAX_CRASHES
) -> dict[UUID, str]:
    """A head gives back jobs under which its pipeline broke, though it lives. Returns what
    `requeue_or_fail` does; a job that is missing is not the head's any more."""
    held = list(connection.scalars(LOCK_HELD, {"keys": dump_keys(keys)}))
    return requeue_or_fail(connection, last_attempts(connection, held), max_crashes=max_crashes)


def requeue_or_fail(
    connection: Connection, rows: Iterable[Row[Any]], *, max_crashes: int = MAX_CRASHES
) -> dict[UUID, str]:
    """Locked rows of `last_attempts`. Returns `released`, `lost` or `crashed` for those that were
    requeued, and the state of those that used up their crashes: the number that the job asks for,
    but at most `max_crashes`, since each costs everybody's pipeline a restart."""
    ends: list[End] = []
    parked: list[Key] = []
    lost: list[Key] = []
    crashed: list[Key] = []
    for row in rows:
        if row.parked:
            parked.append((row.id, row.fence))
        elif row.has_progress:
            lost.append((row.id, row.fence))
        elif row.crashes + 1 < min(row.max_crashes, max_crashes):
            crashed.append((row.id, row.fence))
        else:
            ends.append(_dead_letter(connection, row))
    return {
        **dict.fromkeys(requeue_running(connection, parked, outcome="released"), "released"),
        **dict.fromkeys(requeue_running(connection, lost, outcome="lost"), "lost"),
        **dict.fromkeys(requeue_running(connection, crashed, outcome="crashed"), "crashed"),
        **end_running(connection, ends),
    }


def _dead_letter(connection: Connection, row: Row[Any]) -> End:
    num_crashes = row.crashes + 1
    error = {
        "code": "crashed",
        "problem": f"{num_crashes} attempts ended without a token: "
        "the worker died or hung each time",
        "remedy": "Look at the workers' logs of these times; "
        "once it is mended, `shardline dead replay` tries again",
        "crashes": num_crashes,
        "attempts": _history(connection, row.id),
    }
    return End(job_id=row.id, fence=row.fence, state=JobState.FAILED, error=error)


def _history(connection: Connection, job_id: UUID) -> list[dict[str, Any]]:
    return [dict(row) for row in connection.execute(HISTORY, {"job_id": job_id}).mappings()]
