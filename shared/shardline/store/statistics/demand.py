"""What is asked of a model: how many jobs come, how long they are, and how many wait. Reads
only."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, text

from shardline.contract.tables import IS_READY
from shardline.store.waiting_lines import LINES, MAX_LINES

MAX_COUNTED = 100_000
"""Jobs of one count: this many means at least."""
MAX_SIZED = 1_000
"""The newest results tell how long jobs are."""
MAX_AGED = 250
"""Of each priority: a job may wait longer than one that came before it, with a delay that has just
ended."""

DEMAND = text(f"""
-- Jobs that came within the window.
WITH arrived AS (
    SELECT id, state, created_at FROM jobs
    WHERE model = :model AND created_at > now() - make_interval(secs => :window_s)
    ORDER BY created_at DESC, id DESC LIMIT :max_counted
),
-- The lengths of the newest that succeeded, each found by its key.
sizes AS (
    SELECT (SELECT prompt_tokens FROM results WHERE job_id = newest.id) AS prompt_tokens,
        (SELECT completion_tokens FROM results WHERE job_id = newest.id) AS completion_tokens
    FROM (
        SELECT id FROM arrived WHERE state = 'succeeded' ORDER BY created_at DESC LIMIT :max_sized
    ) AS newest
),
-- Jobs that may run now and that no head has claimed.
waiting AS (
    SELECT FROM jobs WHERE state = 'queued' AND model = :model AND not_before <= now()
        AND ({IS_READY})
        AND paused_by IS NULL
    LIMIT :max_counted
)
SELECT (SELECT count(*) FROM arrived) AS num_arrived, (SELECT count(*) FROM waiting) AS num_queued,
    (SELECT avg(prompt_tokens) FROM sizes) AS prompt,
    (SELECT avg(completion_tokens) FROM sizes) AS output
""")  # noqa: S608 (a constant of ours)

# A job waits from when it may run: since it came, its delay is over, or it was given back.
OLDEST_QUEUED = text(f"""
WITH RECURSIVE {LINES}
SELECT name AS model, extract(epoch FROM now() - (
    SELECT min(greatest(created_at, not_before, requeued_at)) FROM (
        SELECT created_at, not_before, requeued_at FROM jobs
        WHERE state = 'queued' AND sent_at IS NOT NULL AND jobs.model = name
        UNION ALL
        -- The first of each priority and tenant: an index has them in order.
        SELECT first.* FROM (SELECT * FROM lines LIMIT {MAX_LINES}) AS line CROSS JOIN LATERAL (
            SELECT created_at, not_before, requeued_at FROM jobs
            WHERE state = 'queued' AND sent_at IS NULL AND prepared_at IS NOT NULL
                AND paused_by IS NULL AND not_before <= now() AND jobs.model = line.model
                AND jobs.priority = line.priority AND jobs.tenant_id = line.tenant_id
            ORDER BY model, priority, tenant_id, created_at LIMIT {MAX_AGED}
        ) AS first WHERE line.model = name
    ) AS waiting
)) AS seconds
FROM models
""")  # noqa: S608 (a constant of ours)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What was asked of one model, up to now."""

    num_arrived: int
    """Jobs within the window."""
    num_queued: int
    """Jobs that wait and may run: those that are paused do not count."""
    prompt: float | None
    """Tokens of a prompt, on average; None if no job of the window succeeded."""
    output: float | None
    """Tokens of a completion."""


def demand(connection: Connection, model: str, window_s: float) -> Demand:
    """Returns the demand of the last `window_s` seconds."""
    limits = {"max_counted": MAX_COUNTED, "max_sized": MAX_SIZED}
    row = connection.execute(DEMAND, {"model": model, "window_s": window_s, **limits}).one()
    return Demand(
        num_arrived=row.num_arrived,
        num_queued=row.num_queued,
        prompt=None if row.prompt is None else float(row.prompt),
        output=None if row.output is None else float(row.output),
    )


def oldest_queued(connection: Connection) -> dict[str, float]:
    """Returns for how many seconds a job of each registered model has waited at most that may run;
    0 if none does."""
    return {row.model: float(row.seconds or 0) for row in connection.execute(OLDEST_QUEUED)}
