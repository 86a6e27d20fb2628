"""Which jobs are due to be sent to heads, in Postgres's order and within a window. Knows no Redis:
relays publish.

Locks: the advisory lock STAMP_LOCK, then rows of `jobs` with SKIP LOCKED; `unstamp` locks as it
writes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection, text

WINDOW_MIN = 64
WINDOW_PER_SEAT = 4
MAX_BATCH = 128
MAX_DOUBLINGS = 4
"""A message is sent again after 1, 2, 4, 8, then always 16 times `resend_s`."""

STAMP_LOCK = 7_305_793_412
"""Advisory lock: relays stamp one after the other, so that together they keep to the window."""

TAKE_TURN = text(f"SELECT pg_try_advisory_xact_lock({STAMP_LOCK})")

# The inner LIMIT is a literal, so that the planner walks the index in order instead of sorting the
# backlog.
STAMP = text(f"""
-- The seats of live pipelines, by model.
WITH seats AS (
    SELECT model, sum(seats) AS seats FROM pipelines WHERE lease_until > now() GROUP BY model
),
-- What each window still takes; a model without a pipeline has a small one, so that its queue is
-- ready when one comes.
windows AS MATERIALIZED (
    SELECT models.name AS model, priority,
        greatest({WINDOW_MIN}, {WINDOW_PER_SEAT} * coalesce(seats.seats, 0)) - (
            SELECT count(*) FROM jobs
            WHERE state = 'queued' AND sent_at IS NOT NULL
                AND model = models.name AND priority = priorities.priority
        ) AS num_free
    FROM models CROSS JOIN generate_series(0, 9) AS priorities(priority)
    LEFT JOIN seats ON seats.model = models.name
),
-- The oldest jobs that wait for each window, numbered from 1.
oldest AS (
    SELECT windows.num_free, first.id, windows.priority, first.created_at,
        row_number() OVER (
            PARTITION BY windows.model, windows.priority ORDER BY first.created_at, first.id
        ) AS number
    FROM windows CROSS JOIN LATERAL (
        SELECT id, created_at FROM jobs
        WHERE state = 'queued' AND sent_at IS NULL AND prepared_at IS NOT NULL
            AND jobs.model = windows.model AND jobs.priority = windows.priority
            AND not_before <= now() AND cancel_requested_at IS NULL
        ORDER BY created_at, id LIMIT {MAX_BATCH}
    ) AS first
    WHERE windows.num_free > 0
),
-- Those that fit into their window, urgent ones first.
due AS (
    SELECT id FROM oldest WHERE number <= num_free
    ORDER BY priority, created_at, id LIMIT {MAX_BATCH}
),
-- Sent long ago and claimed by nobody, so the message may be lost: each time the wait doubles.
unclaimed AS (
    SELECT id FROM jobs
    WHERE state = 'queued' AND sent_at <= now()
        - make_interval(secs => :resend_s * 2 ^ least(greatest(num_sends - 1, 0), {MAX_DOUBLINGS}))
    ORDER BY sent_at LIMIT {MAX_BATCH}
),
-- Both, locked in order of id; what somebody else has locked has its turn the next time.
locked AS (
    SELECT id FROM jobs
    WHERE id = ANY(ARRAY(SELECT id FROM due UNION ALL SELECT id FROM unclaimed))
        AND state = 'queued' AND cancel_requested_at IS NULL
    ORDER BY id FOR UPDATE SKIP LOCKED
),
-- The time that the next look compares with: the message itself leaves after COMMIT.
stamped AS (
    UPDATE jobs SET sent_at = now(), num_sends = num_sends + 1
    FROM locked WHERE jobs.id = locked.id AND state = 'queued'
    RETURNING jobs.id, model, priority, num_sends, traceparent, created_at
)
SELECT id, model, priority, num_sends, traceparent FROM stamped ORDER BY priority, created_at, id
""")  # noqa: S608 (constants of ours)

UNSTAMP = text("""
UPDATE jobs SET sent_at = NULL, num_sends = greatest(num_sends - 1, 0)
WHERE id = ANY(CAST(:ids AS uuid[])) AND state = 'queued' AND sent_at IS NOT NULL
""")

UNSTAMP_SENT = text(f"""
-- Some of those that count as sent; what is locked is being claimed or has its turn the next time.
WITH sent AS (
    SELECT id FROM jobs WHERE state = 'queued' AND sent_at IS NOT NULL
    LIMIT {MAX_BATCH} FOR UPDATE SKIP LOCKED
)
UPDATE jobs SET sent_at = NULL, num_sends = 0 FROM sent WHERE jobs.id = sent.id AND state = 'queued'
""")  # noqa: S608 (a constant of ours)


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """A job to be sent after COMMIT; `num_sends` counts this time."""

    job_id: UUID
    model: str
    priority: int
    num_sends: int
    traceparent: str | None


def stamp_due(connection: Connection, *, resend_s: float) -> list[Send]:
    """Take the jobs that are due: new ones while the window of their model and priority has room,
    and those sent long ago and never claimed. Empty also while another relay is stamping."""
    if not connection.scalar(TAKE_TURN):
        return []
    return [
        Send(
            job_id=row.id,
            model=row.model,
            priority=row.priority,
            num_sends=row.num_sends,
            traceparent=row.traceparent,
        )
        for row in connection.execute(STAMP, {"resend_s": resend_s})
    ]


def unstamp(connection: Connection, ids: Collection[UUID]) -> None:
    """Sending failed: those of these that are not claimed are due again."""
    connection.execute(UNSTAMP, {"ids": list(ids)})


def unstamp_sent(connection: Connection) -> int:
    """Redis lost everything: of what was sent and not claimed, the next MAX_BATCH are due again.
    Returns how many; those that somebody has locked are not among them."""
    return connection.execute(UNSTAMP_SENT).rowcount
