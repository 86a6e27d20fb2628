"""What becomes of an attempt whose engine died under it: a requeue, a crash counted, or a dead letter.

Only an attempt that was computed and saved no token of its own counts as a crash; one that did forgets those before.
Knows neither who noticed nor why it died.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, select, text

from shardline.job import JobState
from shardline.store.claims import End, Key, end_from, requeue
from shardline.store.encoding import dump
from shardline.tables import attempts

MAX_HISTORY = 10

LOCK_HELD = text("""
SELECT jobs.id FROM jobs JOIN jsonb_to_recordset(CAST(:keys AS jsonb)) AS keys(job_id uuid, fence bigint)
    ON keys.job_id = jobs.id AND keys.fence = jobs.fence
WHERE jobs.state = 'running' ORDER BY jobs.id FOR UPDATE OF jobs
""")

# In a statement of its own: it must see the tokens that the last holder committed before we got the lock.
CONTENTS = text("""
SELECT jobs.id, jobs.fence, crashes, max_crashes,
    cancel_requested_at IS NOT NULL AS is_cancelled, coalesce(deadline_at <= now(), false) AS is_expired,
    coalesce(cardinality(tokens) > 0, false) AS has_tokens,
    coalesce(cardinality(tokens) > num_resumed, false) AS has_progress,
    coalesce(parked, false) AS parked
FROM jobs LEFT JOIN attempts ON attempts.job_id = jobs.id AND attempts.fence = jobs.fence
WHERE jobs.id = ANY(CAST(:ids AS uuid[]))
""")

SUSPECTS = text("""
SELECT id FROM jobs WHERE id = ANY(CAST(:ids AS uuid[])) AND state = 'queued' AND crashes > 0
ORDER BY priority, created_at, id
""")


def contents(connection: Connection, ids: Sequence[UUID]) -> Iterable[Row[Any]]:
    """Locked jobs, and whether their last attempt saved anything."""
    return connection.execute(CONTENTS, {"ids": ids}) if ids else ()


def suspects(connection: Connection, ids: Collection[str]) -> list[UUID]:
    """Those that an engine died under before and that wait to run again, in their order."""
    return list(connection.scalars(SUSPECTS, {"ids": list(ids)}))


def blame(connection: Connection, keys: Collection[Key]) -> dict[UUID, str]:
    """A head gives back jobs under which its pipeline broke, though it lives. Returns what `judge` does; a job that is
    missing is not the head's any more."""
    rows = [{"job_id": job_id, "fence": fence} for job_id, fence in keys]
    return judge(connection, contents(connection, list(connection.scalars(LOCK_HELD, {"keys": dump(rows)}))))


def judge(connection: Connection, rows: Iterable[Row[Any]]) -> dict[UUID, str]:
    """Locked rows of `contents`. Returns `released`, `lost` or `crashed` for those that were requeued, and the state of
    those whose crashes are used up."""
    ends: list[End] = []
    parked: list[Key] = []
    lost: list[Key] = []
    crashed: list[Key] = []
    for row in rows:
        if row.parked:
            parked.append((row.id, row.fence))
        elif row.has_progress:
            lost.append((row.id, row.fence))
        elif row.crashes + 1 < row.max_crashes:
            crashed.append((row.id, row.fence))
        else:
            ends.append(_dead_letter(connection, row))
    return {
        **dict.fromkeys(requeue(connection, parked, outcome="released"), "released"),
        **dict.fromkeys(requeue(connection, lost, outcome="lost"), "lost"),
        **dict.fromkeys(requeue(connection, crashed, outcome="crashed"), "crashed"),
        **end_from(connection, ends, held=JobState.RUNNING),
    }


def _dead_letter(connection: Connection, row: Row[Any]) -> End:
    num_crashes = row.crashes + 1
    error = {
        "code": "crashed",
        "problem": f"{num_crashes} attempts ended without a token: the worker died or hung each time",
        "remedy": "Look at the workers' logs of these times; once it is mended, `shardline dead replay` tries again",
        "crashes": num_crashes,
        "attempts": _history(connection, row.id),
    }
    return End(job_id=row.id, fence=row.fence, state=JobState.FAILED, error=error)


def _history(connection: Connection, job_id: UUID) -> list[dict[str, Any]]:
    columns = [attempts.c[name] for name in ("fence", "pipeline", "worker", "outcome", "started_at", "heartbeat_at")]
    newest = select(*columns).where(attempts.c.job_id == job_id).order_by(attempts.c.fence.desc()).limit(MAX_HISTORY)
    return [dict(row) for row in connection.execute(newest).mappings()]
