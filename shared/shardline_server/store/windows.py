"""What relays look at in a turn: the windows that have room, and the tenants with jobs that may go
into them. Parts of statements; asks nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID

from shardline.store.waiting_lines import LINES, MAX_LINES

WINDOW_MIN = 64
WINDOW_PER_SEAT = 4
MAX_BATCH = 128
MAX_PARTIES = 32
"""Tenants with jobs in one batch of a window: those that have had the least."""

PARTIES = f"""
-- Each model, priority and tenant with jobs to send, by one step in jobs_to_send.
{LINES},
-- The seats of live pipelines, by model.
seats AS (
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
                AND id <> ALL(CAST(:locked_ids AS uuid[]))
        ) AS num_free
    FROM models CROSS JOIN generate_series(0, 9) AS priorities(priority)
    LEFT JOIN seats ON seats.model = models.name
),
-- The tenants that wait for each window, with what is behind them: those that have had the least
-- for their weight have their turns.
parties AS MATERIALIZED (
    SELECT * FROM (
        SELECT windows.*, line.tenant_id, weight, coalesce(ratio, 1) AS ratio,
            (coalesce(served, 0) + coalesce(in_flight, 0)) / weight AS had,
            count(*) OVER places > 1 AS has_rivals,
            row_number() OVER (places ORDER BY
                (coalesce(served, 0) + coalesce(in_flight, 0)) / weight, line.tenant_id) AS place
        FROM windows JOIN (SELECT * FROM lines LIMIT {MAX_LINES}) AS line USING (model, priority)
        JOIN tenants ON tenants.id = line.tenant_id
        LEFT JOIN tenant_shares
            ON tenant_shares.model = windows.model AND tenant_shares.tenant_id = line.tenant_id
        WHERE windows.num_free > 0
            AND line.tenant_id <> ALL(CAST(:passed_over AS text[]))
        WINDOW places AS (PARTITION BY windows.model, windows.priority)
    ) AS placed WHERE place <= {MAX_PARTIES}
)"""  # noqa: S608 (constants of ours)
"""After WITH RECURSIVE: `parties`, and `windows` before it. Takes what `LockedRows` gives."""

IS_NEXT = """state = 'queued' AND sent_at IS NULL AND prepared_at IS NOT NULL
            AND paused_by IS NULL
            AND jobs.model = parties.model AND jobs.priority = parties.priority
            AND jobs.tenant_id = parties.tenant_id
            AND not_before <= now() AND cancel_requested_at IS NULL
            AND jobs.id <> ALL(CAST(:locked_ids AS uuid[]))"""
"""A row of `jobs` may be sent for a party, in the order of jobs_to_send. Takes what
`LockedRows` gives."""


@dataclass(slots=True, kw_only=True)
class LockedRows:
    """What a turn found locked by open transactions: these rows take no place in a window, and a
    tenant with more of them than one look finds is passed over."""

    ids: set[UUID] = field(default_factory=set)
    """Rows of `jobs`, sent or not."""
    tenants: set[str] = field(default_factory=set)
    """Those with more of them."""

    def parameters(self) -> dict[str, list[UUID] | list[str]]:
        """Returns the parameters of a statement with `PARTIES`."""
        return {"locked_ids": [*self.ids], "passed_over": [*self.tenants]}
