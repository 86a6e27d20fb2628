"""What a holder reports while it works: heartbeats renew the leases of its claims and save their
tokens. Knows no end.

A heartbeat changes nothing of a job that is no longer `running` under the fence of its claim.
Locks: rows of `jobs` with SKIP LOCKED, before any of their attempts is written: a tenant's role may
have some locked for as long as it likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection, text

from shardline.contract.job import TokenLogprob
from shardline.contract.tables import LEASES_CHANNEL
from shardline.store.connection.encoding import Key, dump, dump_logprobs
from shardline.store.connection.notify import ring

HEARTBEAT = text("""
-- What the holder sends: a claim, and its tokens from `start` on that are not saved yet.
WITH beats AS (
    SELECT * FROM jsonb_to_recordset(CAST(:beats AS jsonb))
        AS beats(job_id uuid, fence bigint, start int, ids int[], logprobs jsonb)
),
-- The jobs that it still holds, and that are not locked elsewhere.
locked AS (
    SELECT jobs.id FROM jobs JOIN beats ON beats.job_id = jobs.id AND beats.fence = jobs.fence
    WHERE jobs.state = 'running' FOR NO KEY UPDATE OF jobs SKIP LOCKED
),
-- Their leases, from now on, and what their holder must hear of.
renewed AS (
    UPDATE jobs SET lease_until = now() + make_interval(secs => :lease_s)
    FROM locked, beats, attempts
    WHERE jobs.id = locked.id AND beats.job_id = jobs.id AND beats.fence = jobs.fence
        AND jobs.state = 'running'
        AND attempts.job_id = jobs.id AND attempts.fence = jobs.fence
        -- A gap between the checkpoint and these tokens would lose some: such a claim is
        -- not renewed.
        AND cardinality(attempts.tokens) >= beats.start
    RETURNING jobs.id, jobs.fence, jobs.cancel_requested_at, jobs.deadline_at
),
-- Their tokens, each at its index: a heartbeat that is sent twice changes nothing.
saved AS (
    UPDATE attempts SET heartbeat_at = now(),
        tokens = CASE
            WHEN cardinality(beats.ids) = 0 THEN tokens
            ELSE tokens[1:beats.start] || beats.ids END,
        logprobs = CASE
            WHEN beats.logprobs IS NULL THEN attempts.logprobs
            WHEN beats.start = 0 THEN beats.logprobs
            ELSE jsonb_path_query_array(
                attempts.logprobs, '$[0 to $last]', jsonb_build_object('last', beats.start - 1)
            ) || beats.logprobs END
    FROM renewed JOIN beats ON beats.job_id = renewed.id AND beats.fence = renewed.fence
    WHERE attempts.job_id = renewed.id AND attempts.fence = renewed.fence
)
SELECT id, fence, true AS renewed, cancel_requested_at IS NOT NULL AS cancel_requested,
    coalesce(deadline_at <= now(), false) AS expired
FROM renewed
UNION ALL
SELECT jobs.id, jobs.fence, false, false, false
FROM jobs JOIN beats ON beats.job_id = jobs.id AND beats.fence = jobs.fence
WHERE jobs.state = 'running' AND jobs.id NOT IN (SELECT id FROM locked)
""")

EXPIRE = text("""
-- All that runs under this worker's name; what a relay has locked is being moved already, and what
-- a tenant has locked waits for the end of its lease.
WITH held AS (
    SELECT id FROM jobs
    WHERE state = 'running' AND worker = :worker AND pipeline = :pipeline AND lease_until > now()
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE jobs SET lease_until = now() FROM held WHERE jobs.id = held.id
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A sign of life of one job, with the output tokens from index `start` on that are not saved
    yet."""

    job_id: UUID
    fence: int
    start: int
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatReply:
    """The claim holds; what its holder must do next."""

    renewed: bool
    """False: another transaction has the row locked, so its lease is as old as before and its
    tokens are not saved."""
    cancel_requested: bool
    expired: bool


def heartbeat(
    connection: Connection, beats: Sequence[Beat], *, lease_s: float
) -> dict[Key, BeatReply]:
    """Renew leases and save tokens, all in one statement. A key that is missing lost its fence:
    drop the job."""
    rows = [
        {
            "job_id": beat.job_id,
            "fence": beat.fence,
            "start": beat.start,
            "ids": beat.ids,
            "logprobs": dump_logprobs(beat.logprobs) or None,
        }
        for beat in beats
    ]
    replies = connection.execute(HEARTBEAT, {"beats": dump(rows), "lease_s": lease_s})
    return {
        (row.id, row.fence): BeatReply(
            renewed=row.renewed, cancel_requested=row.cancel_requested, expired=row.expired
        )
        for row in replies
    }


def expire_held_by(connection: Connection, *, worker: str, pipeline: str) -> int:
    """Expires what a restarted head held before: that need not wait for the end of its leases.
    Returns how many; relays move them as ever, and the fence keeps out a predecessor that is alive
    after all."""
    num_held = connection.execute(EXPIRE, {"worker": worker, "pipeline": pipeline}).rowcount
    if num_held:
        ring(connection, LEASES_CHANNEL)
    return num_held
