"""Which jobs are due to be sent to heads, in Postgres's order and within a window. Knows no Redis: relays publish."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, func, select, text, update

from shardline.job import JobState
from shardline.store.encoding import is_any
from shardline.tables import jobs

WINDOW_MIN = 64
WINDOW_PER_SEAT = 4
MAX_BATCH = 512
MAX_DOUBLINGS = 4
"""A message is sent again after 1, 2, 4, 8, then always 16 times `resend_s`."""

STAMP_LOCK = 7_305_793_412
"""Advisory lock: relays stamp one after the other, so that together they keep to the window."""

STAMP = text("""
WITH seats AS (
    SELECT model, sum(seats) AS seats FROM pipelines WHERE lease_until > now() GROUP BY model
), rooms AS (
    SELECT models.name AS model, priority,
        greatest(:window_min, :window_per_seat * coalesce(seats.seats, 0)) - (
            SELECT count(*) FROM jobs
            WHERE state = 'queued' AND sent_at IS NOT NULL AND model = models.name AND priority = priorities.priority
        ) AS room
    FROM models CROSS JOIN generate_series(0, 9) AS priorities(priority) LEFT JOIN seats ON seats.model = models.name
), due AS (
    SELECT oldest.id FROM rooms CROSS JOIN LATERAL (
        SELECT id, created_at FROM jobs
        WHERE state = 'queued' AND sent_at IS NULL AND prepared_at IS NOT NULL AND jobs.model = rooms.model
            AND jobs.priority = rooms.priority AND not_before <= now() AND cancel_requested_at IS NULL
        ORDER BY created_at, id LIMIT least(greatest(rooms.room, 0), :max_batch) FOR UPDATE SKIP LOCKED
    ) AS oldest
    ORDER BY rooms.priority, oldest.created_at, oldest.id LIMIT :max_batch
), lost AS (
    SELECT id FROM jobs
    WHERE state = 'queued' AND cancel_requested_at IS NULL
        AND sent_at <= now() - make_interval(secs => :resend_s * 2 ^ least(greatest(num_sends - 1, 0), :max_doublings))
    ORDER BY id LIMIT :max_batch FOR UPDATE SKIP LOCKED
), stamped AS (
    UPDATE jobs SET sent_at = now(), num_sends = num_sends + 1
    FROM (SELECT id FROM due UNION SELECT id FROM lost) AS chosen
    WHERE jobs.id = chosen.id AND state = 'queued'
    RETURNING jobs.id, model, priority, num_sends, traceparent, created_at
)
SELECT id, model, priority, num_sends, traceparent FROM stamped ORDER BY priority, created_at, id
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """A job to be sent after COMMIT; `num_sends` counts this time."""

    job_id: UUID
    model: str
    priority: int
    num_sends: int
    traceparent: str | None


def stamp(connection: Connection, *, resend_s: float, max_batch: int = MAX_BATCH) -> list[Send]:
    """Take the jobs that are due: new ones while the window of their model and priority has room, and those sent long
    ago that nobody claimed. Empty also while another relay is stamping."""
    if not connection.scalar(select(func.pg_try_advisory_xact_lock(STAMP_LOCK))):
        return []
    limits: dict[str, Any] = {
        "window_min": WINDOW_MIN,
        "window_per_seat": WINDOW_PER_SEAT,
        "max_batch": max_batch,
        "max_doublings": MAX_DOUBLINGS,
        "resend_s": resend_s,
    }
    return [
        Send(
            job_id=row.id,
            model=row.model,
            priority=row.priority,
            num_sends=row.num_sends,
            traceparent=row.traceparent,
        )
        for row in connection.execute(STAMP, limits)
    ]


def unstamp(connection: Connection, ids: Collection[UUID]) -> None:
    """Sending failed: these are due again."""
    connection.execute(
        update(jobs)
        .where(is_any(jobs.c.id, ids), jobs.c.state == JobState.QUEUED, jobs.c.sent_at.is_not(None))
        .values(sent_at=None, num_sends=func.greatest(jobs.c.num_sends - 1, 0))
    )


def unstamp_all(connection: Connection) -> int:
    """Redis lost everything: all that was sent and not claimed is due again. Returns how many."""
    sent = update(jobs).where(jobs.c.state == JobState.QUEUED, jobs.c.sent_at.is_not(None))
    return connection.execute(sent.values(sent_at=None, num_sends=0)).rowcount
