"""An attempt's energy is its pipeline's mean for the rows it computed; older ones keep theirs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

BEFORE = """
        SELECT *, coalesce(ended_at, heartbeat_at) AS at FROM attempts
        WHERE attempts.job_id = jobs.id
"""

# The last token of an attempt is no row. One that gave no token has taken nothing, once it has
# ended. A result knows how much of the prompt was cached, and spares reading the tokens.
NOW = """
        SELECT coalesce(attempts.ended_at, attempts.heartbeat_at) AS at,
            coalesce(attempts.energy_source, epoch.source) AS energy_source,
            coalesce(attempts.energy_j, epoch.energy_j / epoch.num_rows * CASE
                WHEN known.num_tokens > attempts.num_resumed
                    THEN known.num_prompt + known.num_tokens - 1
                WHEN attempts.ended_at IS NOT NULL THEN 0 END) AS energy_j
        FROM attempts
        LEFT JOIN pipeline_energy AS epoch
            ON epoch.pipeline = attempts.pipeline AND epoch.epoch = attempts.epoch
        CROSS JOIN LATERAL (SELECT
            CASE WHEN results.fence = attempts.fence THEN results.completion_tokens
                ELSE cardinality(attempts.tokens) END AS num_tokens,
            CASE WHEN results.fence = attempts.fence
                THEN results.prompt_tokens - coalesce(results.cached_tokens, 0)
                ELSE cardinality(jobs.prompt_ids) END AS num_prompt
        ) AS known
        WHERE attempts.job_id = jobs.id
"""

JOB_COSTS = """
CREATE OR REPLACE VIEW job_costs AS
SELECT jobs.id AS job_id, jobs.tenant_id, jobs.model, jobs.state, jobs.created_at,
    results.prompt_tokens, results.completion_tokens, spent.*
FROM jobs
LEFT JOIN results ON results.job_id = jobs.id
CROSS JOIN LATERAL (
    SELECT count(*) AS num_attempts,
        count(*) FILTER (WHERE energy_j IS NULL) AS num_unknown,
        sum(energy_j) AS energy_j,
        sum(energy_j) / 3.6e6 AS kwh,
        sum(energy_j / 3.6e6 * (SELECT per_kwh FROM energy_rates
            WHERE kind = 'price' AND begins_at <= at ORDER BY begins_at DESC LIMIT 1)) AS cost,
        sum(energy_j / 3.6e6 * (SELECT per_kwh FROM energy_rates
            WHERE kind = 'carbon' AND begins_at <= at ORDER BY begins_at DESC LIMIT 1)) AS carbon_g,
        string_agg(DISTINCT energy_source, '+') AS energy_source
    FROM ({attempts}) AS attempts
) AS spent
"""


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.create_table(
        "pipeline_energy",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("energy_j", sa.Double, nullable=False),
        sa.Column("num_rows", sa.BigInteger, nullable=False),
        sa.Column(
            "updated_at", sa.TIMESTAMP(timezone=True), nullable=False, server_default=sa.func.now()
        ),
        sa.CheckConstraint("num_rows > 0", name=op.f("pipeline_energy_rows_were_computed")),
    )
    op.execute(JOB_COSTS.format(attempts=NOW))


def downgrade() -> None:
    """Bring the schema back to the revision before."""
    op.execute(JOB_COSTS.format(attempts=BEFORE))
    op.drop_table("pipeline_energy")
