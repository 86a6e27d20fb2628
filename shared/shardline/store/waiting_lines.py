"""The lines of jobs that wait to be sent: one for each model, priority and tenant. Parts of a
statement that finds them without reading what stands in them. Asks nothing."""

from __future__ import annotations

MAX_LINES = 1_000
"""That one look finds."""

# No other index has this order, so that no plan reads more than a row of each line.
_LINE = """SELECT model, priority, tenant_id FROM jobs
    WHERE state = 'queued' AND sent_at IS NULL AND prepared_at IS NOT NULL
        AND paused_by IS NULL{rule}
    ORDER BY model, priority, tenant_id LIMIT 1"""
_NEXT = _LINE.format(
    rule="""
        AND (model, priority, tenant_id) > (lines.model, lines.priority, lines.tenant_id)"""
)

LINES = f"""lines AS (
    ({_LINE.format(rule="")})
    UNION ALL
    SELECT next.* FROM lines CROSS JOIN LATERAL ({_NEXT}) AS next
)"""  # noqa: S608 (constants of ours)
"""After WITH RECURSIVE; to be read with a limit of MAX_LINES."""
