"""Attempts say what energy they took; rates and a view make money and carbon of it; jobs may wait
for a low rate."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

# Reads rates at the end of each attempt, so that rates which come late, or are mended, count for
# what is past.
JOB_COSTS = """
CREATE VIEW job_costs AS
SELECT jobs.id AS job_id, jobs.tenant_id, jobs.model, jobs.state, jobs.created_at,
    results.prompt_tokens, results.completion_tokens, spent.*
FROM jobs
CROSS JOIN LATERAL (
    SELECT count(*) AS num_attempts,
        count(*) FILTER (WHERE energy_j IS NULL) AS num_unknown,
        sum(energy_j) AS energy_j,
        sum(energy_j) / 3.6e6 AS kwh,
        sum(energy_j / 3.6e6 * (
            SELECT per_kwh FROM energy_rates WHERE kind = 'price' AND begins_at <= at
            ORDER BY begins_at DESC LIMIT 1)) AS cost,
        sum(energy_j / 3.6e6 * (
            SELECT per_kwh FROM energy_rates WHERE kind = 'carbon' AND begins_at <= at
            ORDER BY begins_at DESC LIMIT 1)) AS carbon_g,
        string_agg(DISTINCT energy_source, '+') AS energy_source
    FROM (
        SELECT *, coalesce(ended_at, heartbeat_at) AS at FROM attempts
        WHERE attempts.job_id = jobs.id
    ) AS attempts
) AS spent
LEFT JOIN results ON results.job_id = jobs.id
"""

# The beginning of the lowest known rate, the earliest of equal ones; within the rate that holds at
# `earliest`, that.
CHEAPEST_MOMENT = """
CREATE FUNCTION shardline_cheapest_moment(of_kind text, earliest timestamptz, latest timestamptz)
RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT coalesce((
        SELECT greatest(begins_at, earliest) FROM energy_rates
        WHERE kind = of_kind AND begins_at <= greatest(earliest, latest) AND begins_at >= coalesce((
            SELECT max(begins_at) FROM energy_rates WHERE kind = of_kind AND begins_at <= earliest
        ), earliest)
        ORDER BY per_kwh, begins_at LIMIT 1
    ), earliest)
$$
"""


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.create_table(
        "energy_rates",
        sa.Column("kind", sa.Text, primary_key=True),
        sa.Column("begins_at", sa.TIMESTAMP(timezone=True), primary_key=True),
        sa.Column("per_kwh", sa.Double, nullable=False),
        sa.CheckConstraint("kind IN ('price', 'carbon')", name=op.f("energy_rates_kind_is_known")),
    )
    op.add_column("attempts", sa.Column("energy_j", sa.Double))
    op.add_column("attempts", sa.Column("energy_source", sa.Text))
    # Of the tables that it reads a view asks for no lock that a statement of ours would wait for.
    op.execute(JOB_COSTS)
    op.execute(CHEAPEST_MOMENT)


def downgrade() -> None:
    """Bring the schema back."""
    op.execute("DROP FUNCTION shardline_cheapest_moment(text, timestamptz, timestamptz)")
    op.execute("DROP VIEW job_costs")
    for column in ("energy_j", "energy_source"):
        op.drop_column("attempts", column)
    op.drop_table("energy_rates")
