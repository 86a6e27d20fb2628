"""Deletes jobs that ended long ago, with their attempts and results. Knows no settings: how long is the caller's.

A dead letter that nobody has replayed is never deleted: somebody must look at it first.
"""

from __future__ import annotations

from sqlalchemy import Connection, text

from shardline.tables import DEAD

MAX_BATCH = 500

LOCK = 7_305_793_413
"""Advisory lock of a transaction: one deletes at a time, so that two never wait for each other's replays."""

TRY_LOCK = text("SELECT pg_try_advisory_xact_lock(:lock)")

# In the order of jobs_listing: nobody ends before it was created, and what stays behind is little. A replay outlives
# what it replays, else that would look as if it had none.
LOCK_OLD = text(f"""
SELECT id FROM jobs
WHERE created_at < now() - make_interval(secs => :age_s) AND finished_at < now() - make_interval(secs => :age_s)
    AND replay_of IS NULL
    AND (({DEAD}) IS NOT TRUE OR EXISTS (SELECT FROM jobs AS replays WHERE replays.replay_of = jobs.id))
ORDER BY created_at, id LIMIT :max_batch FOR UPDATE SKIP LOCKED
""")  # noqa: S608 (a constant of ours)

DELETE = text("DELETE FROM jobs WHERE id = ANY(CAST(:ids AS uuid[]))")


def delete_old(connection: Connection, *, age_s: float, max_batch: int = MAX_BATCH) -> int:
    """The oldest of those that ended more than `age_s` ago; how many. Rows that somebody else has locked stay."""
    if not connection.scalar(TRY_LOCK, {"lock": LOCK}):
        return 0
    ids = list(connection.scalars(LOCK_OLD, {"age_s": age_s, "max_batch": max_batch}))
    return connection.execute(DELETE, {"ids": ids}).rowcount if ids else 0
