"""What the judges of tenants read: plain SQL, and moves of jobs that a trigger of the harness wrote
down. Knows nothing of the product's code, only its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import dict_row

from tests.chaos.load.journal import Asked
from tests.chaos.load.tenants.ledger import MARK, SPENDER

DOOR = "tenants"

# In the order in which they were written: after the locks that a quota takes, so that what one of
# them saw is before it. `began_at` is when its transaction began.
INSTALL = """
CREATE TABLE judge.moves (
    id bigint GENERATED ALWAYS AS IDENTITY, job_id uuid NOT NULL, tenant_id text NOT NULL,
    old text, new text NOT NULL, began_at timestamptz NOT NULL DEFAULT now(),
    at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE FUNCTION judge.see_new() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO judge.moves (job_id, tenant_id, new)
    SELECT id, tenant_id, state FROM fresh WHERE starts_with(tenant_id, 'chaos-') ORDER BY id;
    RETURN NULL;
END $$;
-- Triggers come in the order of their names: this one behind the one that asks quotas.
CREATE TRIGGER zz_judge_new AFTER INSERT ON jobs REFERENCING NEW TABLE AS fresh
    FOR EACH STATEMENT EXECUTE FUNCTION judge.see_new();

CREATE FUNCTION judge.see_move() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO judge.moves (job_id, tenant_id, old, new)
    VALUES (NEW.id, NEW.tenant_id, OLD.state, NEW.state);
    RETURN NULL;
END $$;
CREATE TRIGGER judge_moves AFTER UPDATE OF state ON jobs FOR EACH ROW
    WHEN (OLD.state <> NEW.state AND starts_with(NEW.tenant_id, 'chaos-'))
    EXECUTE FUNCTION judge.see_move();
"""
JOBS = """
SELECT jobs.id, tenant_id, state, metadata, jobs.created_at, finished_at, error, jobs.fence,
    priority, cancel_requested_at, replay_of, prompt_ids, prompt_tokens, completion_tokens,
    (SELECT min(started_at) FROM attempts WHERE job_id = jobs.id) AS began_at
FROM jobs LEFT JOIN results ON results.job_id = jobs.id
WHERE metadata ->> 'asked_by' = %s ORDER BY jobs.created_at, jobs.id
"""
MOVES = "SELECT * FROM judge.moves WHERE tenant_id = %s ORDER BY id"
ATTEMPTS = """
SELECT job_id, attempts.fence, started_at, tenant_id, metadata
FROM attempts JOIN jobs ON jobs.id = job_id WHERE metadata ->> 'asked_by' = %s
"""
# What is used, with what is still to be folded in.
USE = """
SELECT queued, bytes, open_tokens, open_money, spent_tokens, spent_money,
    (SELECT count(*) FROM reservations WHERE quotas.id = ANY(reservations.quotas)) AS num_reserved
FROM quotas CROSS JOIN LATERAL (
    SELECT sum(queued) AS queued, sum(bytes) AS bytes, sum(open_tokens) AS open_tokens,
        sum(open_money) AS open_money, sum(spent_tokens) AS spent_tokens,
        sum(spent_money) AS spent_money
    FROM (
        SELECT quota_id, queued, bytes, open_tokens, open_money, spent_tokens, spent_money
        FROM quota_use
        UNION ALL
        SELECT quota_id, queued, bytes, open_tokens, open_money, spent_tokens, spent_money
        FROM quota_changes
    ) AS each WHERE quota_id = quotas.id
) AS total WHERE tenant_id = %s
"""
DELIVERIES = """
SELECT id, event_type, object_id, state, num_attempts, status_code, error
FROM webhook_deliveries WHERE endpoint_id = %s AND NOT is_test
"""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRows:
    """All that is there when the load is over."""

    jobs: Mapping[UUID, Row]
    attempts: Sequence[Row]
    moves: Sequence[Row]
    """Of the tenant with quotas."""
    use: Row | None
    """Of its quota."""
    deliveries: Sequence[Row]


def read_rows(database_url: str, endpoint_id: UUID | None) -> TenantRows:
    """Everything, at one moment."""
    with psycopg.connect(database_url, row_factory=dict_row) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        return TenantRows(
            jobs={row["id"]: row for row in connection.execute(JOBS, (MARK,))},
            attempts=connection.execute(ATTEMPTS, (MARK,)).fetchall(),
            moves=connection.execute(MOVES, (SPENDER,)).fetchall(),
            use=connection.execute(USE, (SPENDER,)).fetchone(),
            deliveries=connection.execute(DELIVERIES, (endpoint_id,)).fetchall(),
        )


def tenant_jobs(database_url: str) -> list[Asked]:
    """Their jobs that are requests of the set, as the judge of all jobs takes them."""
    with psycopg.connect(database_url, row_factory=dict_row) as connection:
        rows = connection.execute(JOBS, (MARK,)).fetchall()
    return [
        Asked(
            id=row["id"],
            number=row["metadata"]["number"],
            door=DOOR,
            ends=frozenset(row["metadata"]["ends"]),
            promised=True,
            has_row=True,
        )
        for row in rows
        if "number" in row["metadata"]
    ]


def latest(moments: Sequence[datetime | None]) -> datetime | None:
    """The last one; None if one is missing."""
    known = [moment for moment in moments if moment is not None]
    return max(known, default=None) if len(known) == len(moments) else None
