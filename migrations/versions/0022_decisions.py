"""Results have the numbers of a question's answer; the view `decisions` has them by question."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

DECISIONS = """
CREATE VIEW decisions AS
SELECT jobs.id AS job_id, jobs.tenant_id, jobs.model, jobs.state, jobs.created_at, jobs.metadata,
    jobs.params #>> '{question,name}' AS name, jobs.params #>> '{question,type}' AS type,
    results.choice, results.probability, results.confidence, results.score,
    results.probabilities, results.label_mass, jobs.error
FROM jobs LEFT JOIN results ON results.job_id = jobs.id
WHERE jobs.params -> 'question' IS NOT NULL
"""

COLUMNS = ("label_mass", "probabilities", "score", "confidence", "probability", "choice")


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.add_column("results", sa.Column("choice", sa.Text))
    op.add_column("results", sa.Column("probability", sa.Double))
    op.add_column("results", sa.Column("confidence", sa.Double))
    op.add_column("results", sa.Column("score", sa.Double))
    op.add_column("results", sa.Column("probabilities", ARRAY(sa.Double)))
    op.add_column("results", sa.Column("label_mass", sa.Double))
    op.execute(DECISIONS)


def downgrade() -> None:
    """Bring the schema back to the revision before."""
    op.execute("DROP VIEW decisions")
    for name in COLUMNS:
        op.drop_column("results", name)
