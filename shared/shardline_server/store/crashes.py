"""What becomes of an attempt that failed: a requeue, at once or after its policy's wait, or an end.

After an engine died an attempt counts as a crash if it was computed and saved no token; one that
saved some forgets the crashes before. A queued job with a crash behind it is *quarantined*: heads
run it alone. Knows neither who noticed nor why it died.
Locks: rows of `jobs` with SKIP LOCKED, here or in the caller's statement, before any of their
attempts is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text

from shardline.base.config import Settings
from shardline.contract.job import MAX_CRASHES, JobState
from shardline.contract.retry_policy import MAX_ATTEMPTS, RetriedFailure, RetryPolicy
from shardline.store.connection.encoding import Key, dump, dump_keys, readable_retry
from shardline_server.store.ends import End, end_running, requeue_running

MAX_HISTORY = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLimits:
    """What an installation allows at most, whatever a job asks for."""

    max_crashes: int = MAX_CRASHES
    """Of a job without a policy."""
    max_attempts: int = MAX_ATTEMPTS
    """Of one with a policy."""

    @classmethod
    def of(cls, settings: Settings) -> AttemptLimits:
        """Returns those that the operator has set."""
        return cls(max_crashes=settings.max_crashes, max_attempts=settings.max_attempts)


NO_CEILING = AttemptLimits()

LOCK_HELD = text("""
SELECT jobs.id
FROM jobs JOIN jsonb_to_recordset(CAST(:keys AS jsonb)) AS keys(job_id uuid, fence bigint)
    ON keys.job_id = jobs.id AND keys.fence = jobs.fence
WHERE jobs.state = 'running' FOR NO KEY UPDATE OF jobs SKIP LOCKED
""")

# In a separate statement: it must see the tokens that the last holder committed before we got the
# lock.
LAST_ATTEMPTS = text("""
SELECT jobs.id, jobs.fence, jobs.crashes, jobs.max_crashes, jobs.retry,
    -- This one is not among them yet.
    CASE WHEN jobs.retry IS NOT NULL THEN (
        SELECT count(*) FROM attempts AS failed
        WHERE failed.job_id = jobs.id AND failed.outcome IN ('crashed', 'failed')
    ) END AS num_failures,
    jobs.cancel_requested_at IS NOT NULL AS is_cancelled,
    coalesce(jobs.deadline_at <= now(), false) AS is_expired,
    coalesce(cardinality(attempts.tokens) > 0, false) AS has_tokens,
    coalesce(cardinality(attempts.tokens) > attempts.num_resumed, false) AS has_progress,
    coalesce(attempts.parked, false) AS parked
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
    connection: Connection, keys: Collection[Key], *, limits: AttemptLimits = NO_CEILING
) -> dict[UUID, str]:
    """A head gives back jobs under which its pipeline broke, though it lives. Returns what
    `requeue_or_fail` does; a job that is missing is not the head's any more, or locked by another
    transaction, and its lease is left to run out."""
    return requeue_or_fail(connection, _held(connection, keys), limits=limits)


def requeue_failed_held(
    connection: Connection, keys: Collection[Key], *, limits: AttemptLimits = NO_CEILING
) -> dict[UUID, bool]:
    """A head's engine has ended these jobs alone. Returns whether each was requeued, since its
    policy tries that again, or is to end. A job that is missing is not the head's any more, or
    locked by another transaction."""
    held = list(_held(connection, keys))
    waits: dict[Key, float] = {}
    for row in held:
        wait_s = _wait_s(row, readable_retry(row.retry), "engine", limits)
        if wait_s is not None:
            waits[row.id, row.fence] = wait_s
    requeued = requeue_running(connection, waits, outcome="failed", waits=waits)
    return {row.id: row.id in requeued for row in held}


def requeue_or_fail(
    connection: Connection, rows: Iterable[Row[Any]], *, limits: AttemptLimits = NO_CEILING
) -> dict[UUID, str]:
    """Locked rows of `last_attempts`. Returns `released`, `lost` or `crashed` for those that were
    requeued, and the state of those that used up their attempts or crashes: the job's
    number, but at most the limits', since each costs everybody's pipeline a restart."""
    ends: list[End] = []
    parked: list[Key] = []
    lost: list[Key] = []
    crashed: list[Key] = []
    waits: dict[Key, float] = {}
    for row in rows:
        key = (row.id, row.fence)
        policy = readable_retry(row.retry)
        if row.has_progress:
            lost.append(key)
        elif row.parked:
            parked.append(key)
        elif (wait_s := _wait_s(row, policy, "crashed", limits)) is not None:
            crashed.append(key)
            waits[key] = wait_s
        elif policy is None and row.crashes + 1 < min(row.max_crashes, limits.max_crashes):
            crashed.append(key)
        else:
            ends.append(_dead_letter(connection, row))
    again = requeue_running(connection, crashed, outcome="crashed", waits=waits)
    return {
        **dict.fromkeys(requeue_running(connection, parked, outcome="released"), "released"),
        **dict.fromkeys(requeue_running(connection, lost, outcome="lost"), "lost"),
        **dict.fromkeys(again, "crashed"),
        **end_running(connection, ends),
    }


def _held(connection: Connection, keys: Collection[Key]) -> Iterable[Row[Any]]:
    held = list(connection.scalars(LOCK_HELD, {"keys": dump_keys(keys)}))
    return last_attempts(connection, held)


def _wait_s(
    row: Row[Any], policy: RetryPolicy | None, failure: RetriedFailure, limits: AttemptLimits
) -> float | None:
    """Returns the longest wait before the next attempt; None: the policy has none, or there is no
    policy."""
    num_failures = (row.num_failures or 0) + 1
    if policy is None or not policy.tries_again(failure, num_failures, limits.max_attempts):
        return None
    return policy.wait_s(num_failures)


def _dead_letter(connection: Connection, row: Row[Any]) -> End:
    num_crashes = row.crashes + 1
    of_policy = "" if row.retry is None else f" (its retry policy: {dump(row.retry)})"
    error = {
        "code": "crashed",
        "problem": f"{num_crashes} attempts ended without a token: "
        f"the worker died or hung each time{of_policy}",
        "remedy": "Look at the workers' logs of these times; "
        "once it is mended, `shardline dead replay` tries again",
        "crashes": num_crashes,
        "attempts": _history(connection, row.id),
    }
    return End(job_id=row.id, fence=row.fence, state=JobState.FAILED, error=error)


def _history(connection: Connection, job_id: UUID) -> list[dict[str, Any]]:
    return [dict(row) for row in connection.execute(HISTORY, {"job_id": job_id}).mappings()]
