"""Takes paused jobs out of what waits to be sent, so that thousands of them cost no later look
anything, and puts them back. Decides nothing: the table `pauses` does.

A relay comes upon them where it looks for jobs to send.
Locks: rows of `jobs` with SKIP LOCKED.
"""

from __future__ import annotations

from sqlalchemy import Connection, text

from shardline.store.schedules.pauses import PAUSED_BY
from shardline_server.store.turns import RelayTurn, take_turn
from shardline_server.store.windows import IS_NEXT, MAX_BATCH, PARTIES, LockedRows

MAX_RELEASED = 1_000
"""Jobs that one turn puts back."""

SET_ASIDE = text(f"""
WITH RECURSIVE {PARTIES},
-- What would be sent next, and what is sent and not claimed: no head claims it either.
next AS MATERIALIZED (
    SELECT first.* FROM parties CROSS JOIN LATERAL (
        SELECT id, {PAUSED_BY} AS paused_by FROM jobs
        WHERE {IS_NEXT}
        ORDER BY model, priority, tenant_id, created_at, id LIMIT {MAX_BATCH}
    ) AS first
    UNION ALL
    SELECT id, {PAUSED_BY} FROM jobs WHERE state = 'queued' AND sent_at IS NOT NULL
),
-- Those of them that are paused; what somebody else has locked has its turn the next time.
halted AS (
    SELECT id, {PAUSED_BY} AS paused_by FROM jobs
    WHERE id = ANY(ARRAY(SELECT id FROM next WHERE paused_by IS NOT NULL)) AND state = 'queued'
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE jobs SET paused_by = halted.paused_by, sent_at = NULL, num_sends = 0
FROM halted WHERE jobs.id = halted.id AND state = 'queued'
""")  # noqa: S608 (constants of ours)

RELEASE = text(f"""
-- Each pause that jobs wait for, by one step in jobs_paused.
WITH RECURSIVE held AS (
    (SELECT paused_by FROM jobs WHERE state = 'queued' AND paused_by IS NOT NULL
        ORDER BY paused_by LIMIT 1)
    UNION ALL
    SELECT next.paused_by FROM held CROSS JOIN LATERAL (
        SELECT paused_by FROM jobs
        WHERE state = 'queued' AND paused_by IS NOT NULL AND paused_by > held.paused_by
        ORDER BY paused_by LIMIT 1
    ) AS next
),
-- Some of those after their pause. In the order of jobs_paused: statistics suggest that nearly each
-- paused job is one of them, and that a scan finds some at once.
freed AS (
    SELECT id FROM jobs
    WHERE state = 'queued' AND paused_by = ANY(ARRAY(
        SELECT paused_by FROM held
        WHERE NOT EXISTS (SELECT FROM pauses WHERE kind || ' ' || target = held.paused_by)))
    ORDER BY paused_by LIMIT {MAX_RELEASED} FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE jobs SET paused_by = NULL FROM freed WHERE jobs.id = freed.id AND state = 'queued'
""")  # noqa: S608 (constants of ours)


def settle(connection: Connection, turn: RelayTurn | None = None) -> int:
    """Puts back jobs after their pause, at most MAX_RELEASED, and takes out what a relay would
    come upon now. Returns how many: while there are some, there may be more behind them. `turn`:
    the one that this transaction has taken already."""
    turn = turn or take_turn(connection)
    num_released = connection.execute(RELEASE).rowcount if turn.is_held else 0
    num_halted = 0
    if turn.is_paused:
        num_halted = connection.execute(SET_ASIDE, LockedRows().parameters()).rowcount
    return num_released + num_halted
