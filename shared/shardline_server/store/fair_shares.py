"""How far each tenant has got with a model's tokens, while several wait for it: the order in which
relays send follows it. Knows no message.

A tenant's virtual time is what it has had, and what it has in flight as far as its last jobs tell,
over its weight. One that
does not wait is not allowed to save up: its time goes on with that of those who wait.
Locks: rows of `tenant_shares`, under the outbox's STAMP_LOCK.
"""

from __future__ import annotations

from sqlalchemy import Connection, text

from shardline.store.waiting_lines import LINES, MAX_LINES

LEARN = 0.9
"""Of what was known of a tenant's jobs, the part that is kept with each one that ends."""

FORGET_S = 60.0
"""A tenant that has not waited for so long does not compete."""

BALANCE = text(f"""
-- What ended since the last look.
WITH RECURSIVE gone AS (DELETE FROM share_changes RETURNING model, tenant_id, tokens, most),
-- By tenant: tokens, and the part of the most that they could have been.
had AS (
    SELECT model, tenant_id, sum(tokens) AS tokens,
        sum(tokens)::float8 / greatest(sum(most), 1) AS ratio,
        -- One job predicts little of the next ones.
        1 - {LEARN} ^ count(*) AS news
    FROM gone GROUP BY 1, 2
),
-- Each model, priority and tenant with jobs to send, by one step in jobs_to_send.
{LINES},
-- Who waits for a model, in any line.
waiting AS (
    SELECT DISTINCT model, tenant_id FROM (SELECT * FROM lines LIMIT {MAX_LINES}) AS few
),
-- All that compete, on models where several do.
rivals AS (
    SELECT model, tenant_id FROM waiting
    UNION
    SELECT model, tenant_id FROM tenant_shares
    WHERE seen_at > now() - make_interval(secs => {FORGET_S})
),
-- The models that several wait for.
contested AS MATERIALIZED (
    SELECT model FROM rivals GROUP BY model HAVING count(*) > 1
),
-- Their jobs on the way, at the most that these may take.
flying AS (
    SELECT model, tenant_id, sum(cardinality(prompt_ids) + max_tokens) AS tokens FROM (
        SELECT model, tenant_id, prompt_ids, max_tokens FROM jobs
        WHERE state = 'running' AND model IN (SELECT model FROM contested)
        UNION ALL
        SELECT model, tenant_id, prompt_ids, max_tokens FROM jobs
        WHERE state = 'queued' AND sent_at IS NOT NULL
            AND model IN (SELECT model FROM contested)
    ) AS sent GROUP BY 1, 2
),
-- What each of them has had, and has on the way.
standing AS (
    SELECT rivals.model, rivals.tenant_id, weight, waiting.tenant_id IS NOT NULL AS is_waiting,
        coalesce(flying.tokens, 0) * now.ratio AS in_flight, now.ratio,
        tenant_shares.served + coalesce(had.tokens, 0)::float8 AS served
    FROM rivals JOIN contested USING (model) JOIN tenants ON tenants.id = rivals.tenant_id
    LEFT JOIN waiting USING (model, tenant_id) LEFT JOIN flying USING (model, tenant_id)
    LEFT JOIN tenant_shares USING (model, tenant_id) LEFT JOIN had USING (model, tenant_id)
    CROSS JOIN LATERAL (SELECT coalesce(tenant_shares.ratio, 1)
        + coalesce(had.news * (had.ratio - coalesce(tenant_shares.ratio, 1)), 0) AS ratio) AS now
),
-- The least of those who wait: who comes new begins there.
floors AS (
    SELECT model,
        min((served + in_flight) / weight) FILTER (WHERE is_waiting) AS least
    FROM standing GROUP BY model
),
-- Where they stand now.
kept AS (
    INSERT INTO tenant_shares (model, tenant_id, served, in_flight, ratio, seen_at)
    SELECT model, tenant_id, CASE WHEN is_waiting AND served IS NOT NULL THEN served
            ELSE greatest(served, coalesce(least, 0) * weight - in_flight) END,
        in_flight, ratio, now()
    FROM standing JOIN floors USING (model)
    ON CONFLICT (model, tenant_id) DO UPDATE SET served = excluded.served,
        in_flight = excluded.in_flight, ratio = excluded.ratio,
        seen_at = CASE WHEN EXISTS (
            SELECT FROM waiting WHERE waiting.model = excluded.model
                AND waiting.tenant_id = excluded.tenant_id)
            THEN now() ELSE tenant_shares.seen_at END
)
DELETE FROM tenant_shares WHERE model NOT IN (SELECT model FROM contested)
    OR (
    seen_at < now() - make_interval(secs => {2 * FORGET_S})
    AND NOT EXISTS (
        SELECT FROM rivals WHERE rivals.model = tenant_shares.model
            AND rivals.tenant_id = tenant_shares.tenant_id))
""")  # noqa: S608 (constants of ours)


def balance(connection: Connection) -> None:
    """Brings the shares up to date. Of no use where there is one tenant."""
    connection.execute(BALANCE)
