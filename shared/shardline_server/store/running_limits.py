"""How many jobs of a tenant or an API key may run at once: what is over that stays queued. Relays
send about the number that has room; this is where the limit holds.

Locks: rows of `quotas` of these tenants, in order of id, after the rows of `jobs`. Not those of
`quota_use`: a transaction that submits has them until its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from sqlalchemy import Connection, text

# In the list of columns of a statement over `jobs`.
IS_LIMITED = """EXISTS (
        SELECT FROM quotas WHERE quotas.tenant_id = jobs.tenant_id AND max_running IS NOT NULL
            AND quotas.key_name IN ('', coalesce(jobs.key_name, ''))
    )"""

LOCK = text("""
SELECT FROM quotas
WHERE max_running IS NOT NULL AND tenant_id IN (
    SELECT tenant_id FROM jobs WHERE id = ANY(CAST(:ids AS uuid[])))
ORDER BY id FOR NO KEY UPDATE
""")
OVER = text("""
SELECT DISTINCT id FROM (
    SELECT jobs.id, quotas.max_running - (
            SELECT count(*) FROM jobs AS others
            WHERE others.tenant_id = quotas.tenant_id AND others.state = 'running'
                AND (quotas.key_name = '' OR others.key_name = quotas.key_name)
        ) AS room,
        row_number() OVER (PARTITION BY quotas.id ORDER BY jobs.priority, jobs.created_at, jobs.id)
            AS number
    FROM jobs JOIN quotas ON quotas.tenant_id = jobs.tenant_id AND quotas.max_running IS NOT NULL
        AND quotas.key_name IN ('', coalesce(jobs.key_name, ''))
    WHERE jobs.id = ANY(CAST(:ids AS uuid[]))
) AS numbered WHERE number > room
""")


def over_limit(connection: Connection, ids: Sequence[UUID]) -> set[UUID]:
    """Those of these locked jobs that must not run now. Until COMMIT no other transaction claims
    jobs of their tenants."""
    if not ids:
        return set()
    connection.execute(LOCK, {"ids": list(ids)})
    return set(connection.scalars(OVER, {"ids": list(ids)}))
