"""Which jobs are due to be sent to heads, in Postgres's order and within a window. Knows no Redis:
relays publish. Within a priority tenants have equal shares of tokens, by their weights.

Locks: the advisory lock of a turn, then rows of `jobs` with SKIP LOCKED.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text

from shardline.store.schedules.pauses import PAUSED_BY
from shardline_server.store.fair_shares import balance
from shardline_server.store.turns import RelayTurn, take_turn
from shardline_server.store.windows import IS_NEXT, MAX_BATCH, PARTIES, LockedRows

MAX_DOUBLINGS = 4
"""A message is sent again after 1, 2, 4, 8, then always 16 times `resend_s`."""

MAX_LOOKS = 4
"""In a turn that finds rows locked. The first finds some, the second whether their tenants have
more of them, the third goes without these tenants; the last is for tenants behind them."""

# The inner LIMIT is a literal, so that the planner walks the index in order instead of sorting the
# backlog.
STAMP = text(f"""
WITH RECURSIVE {PARTIES},
-- How many more jobs of a tenant may run, where that has a limit.
rooms AS MATERIALIZED (
    SELECT tenant_id, greatest(max_running - (
        SELECT count(*) FROM (
            SELECT FROM jobs WHERE jobs.tenant_id = quotas.tenant_id AND state = 'running'
            UNION ALL
            SELECT FROM jobs WHERE state = 'queued' AND sent_at IS NOT NULL
                AND jobs.tenant_id = quotas.tenant_id
        ) AS taken
    ), 0) AS room
    FROM quotas WHERE key_name = '' AND max_running IS NOT NULL
),
-- The oldest jobs of each of them, with the virtual time at which each would begin, were they alone
-- or not.
oldest AS (
    SELECT parties.model, parties.priority, parties.num_free, parties.tenant_id, first.*,
        CASE WHEN has_rivals THEN had + (sum(num_tokens) OVER behind - num_tokens) / weight
            ELSE 0 END AS begins,
        row_number() OVER behind AS number_of_tenant
    FROM parties CROSS JOIN LATERAL (
        SELECT id, created_at, deadline_at,
            CASE WHEN parties.has_rivals THEN (cardinality(prompt_ids) + max_tokens) * parties.ratio
                ELSE 0 END AS num_tokens
        FROM jobs
        WHERE {IS_NEXT}
        ORDER BY model, priority, tenant_id, created_at, id LIMIT {MAX_BATCH}
    ) AS first
    WINDOW behind AS (
        PARTITION BY parties.model, parties.priority, parties.tenant_id
        ORDER BY deadline_at, created_at, id
    )
),
-- In the order of their windows, numbered from 1.
numbered AS (
    SELECT oldest.*, row_number() OVER (
        PARTITION BY model, priority ORDER BY begins, deadline_at, created_at, id
    ) AS number
    FROM oldest LEFT JOIN rooms USING (tenant_id)
    WHERE room IS NULL OR number_of_tenant <= room
),
-- Those that fit into their window, urgent ones first.
due AS MATERIALIZED (
    SELECT id, tenant_id,
        row_number() OVER (ORDER BY priority, number, created_at, id) AS turn
    FROM numbered WHERE number <= num_free
    ORDER BY turn LIMIT {MAX_BATCH}
),
-- Sent long ago and never claimed, so the message may be lost: each time the wait doubles.
unclaimed AS (
    SELECT id FROM jobs
    WHERE state = 'queued' AND id <> ALL(CAST(:locked_ids AS uuid[])) AND sent_at <= now()
        - make_interval(secs => :resend_s * 2 ^ least(greatest(num_sends - 1, 0), {MAX_DOUBLINGS}))
    ORDER BY sent_at LIMIT {MAX_BATCH}
),
-- Both.
looked AS (
    SELECT id, tenant_id, turn FROM due UNION ALL SELECT id, NULL, NULL FROM unclaimed
),
-- Locked in order of id; what somebody else has locked has its turn the next time.
locked AS (
    SELECT id FROM jobs
    WHERE id = ANY(ARRAY(SELECT id FROM looked))
        AND state = 'queued' AND cancel_requested_at IS NULL AND {PAUSED_BY} IS NULL
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
),
-- The time that the next look compares with: the message itself leaves after COMMIT.
stamped AS (
    UPDATE jobs SET sent_at = now(), num_sends = num_sends + 1
    FROM locked WHERE jobs.id = locked.id AND state = 'queued'
    RETURNING jobs.id, model, priority, num_sends, traceparent, created_at
)
-- `num_sends` is NULL for those that were not stamped, `tenant_id` for those sent before.
SELECT looked.id, tenant_id, model, priority, num_sends, traceparent
FROM looked LEFT JOIN stamped ON stamped.id = looked.id
ORDER BY priority, coalesce(turn, 0), created_at, looked.id
""")  # noqa: S608 (constants of ours)

UNSTAMP = text("""
-- Those that count as sent and are not locked elsewhere.
WITH sent AS (
    SELECT id FROM jobs
    WHERE id = ANY(CAST(:ids AS uuid[])) AND state = 'queued' AND sent_at IS NOT NULL
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE jobs SET sent_at = NULL, num_sends = greatest(num_sends - 1, 0)
FROM sent WHERE jobs.id = sent.id AND state = 'queued'
""")

UNSTAMP_SENT = text(f"""
-- Some of those that count as sent; what is locked is being claimed or has its turn the next time.
WITH sent AS (
    SELECT id FROM jobs WHERE state = 'queued' AND sent_at IS NOT NULL
    LIMIT {MAX_BATCH} FOR NO KEY UPDATE SKIP LOCKED
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


def stamp_due(
    connection: Connection, turn: RelayTurn | None = None, *, resend_s: float
) -> list[Send]:
    """Take the jobs that are due: new ones while the window of their model and priority has room,
    and those sent long ago and never claimed. Where rows are locked others go instead of them.
    Empty also while another relay is stamping. `turn`: the one that this transaction has taken
    already."""
    turn = turn or take_turn(connection)
    if not turn.is_ours:
        return []
    if turn.has_rivals:
        balance(connection)
    sends: list[Send] = []
    locked = LockedRows()
    for _ in range(MAX_LOOKS):
        looked = connection.execute(STAMP, {"resend_s": resend_s, **locked.parameters()}).all()
        sends += [_send(row) for row in looked if row.num_sends is not None]
        if not _add(locked, looked):
            break
    return sends


def _send(row: Row[Any]) -> Send:
    return Send(
        job_id=row.id,
        model=row.model,
        priority=row.priority,
        num_sends=row.num_sends,
        traceparent=row.traceparent,
    )


def _add(locked: LockedRows, looked: Sequence[Row[Any]]) -> bool:
    """Whether rows were locked in this look. A tenant with locked queued ones in an earlier look
    too is passed over from now on."""
    rows = [row for row in looked if row.num_sends is None]
    if locked.ids:
        locked.tenants |= {row.tenant_id for row in rows if row.tenant_id is not None}
    locked.ids |= {row.id for row in rows}
    return bool(rows)


def unstamp(connection: Connection, ids: Collection[UUID]) -> None:
    """Sending failed: those of these that are not claimed are due again."""
    connection.execute(UNSTAMP, {"ids": list(ids)})


def unstamp_sent(connection: Connection) -> int:
    """Redis lost everything: of what was sent and not claimed, the next MAX_BATCH are due again.
    Returns how many; those that somebody has locked are not among them."""
    return connection.execute(UNSTAMP_SENT).rowcount
