"""A result has the log-probabilities of its prompt's tokens, where they were asked for."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.add_column("results", sa.Column("prompt_logprobs", JSONB))


def downgrade() -> None:
    """Bring the schema back to the revision before."""
    op.drop_column("results", "prompt_logprobs")
