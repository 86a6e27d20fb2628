"""Results say how many prompt tokens were found in the prefix cache."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.add_column("results", sa.Column("cached_tokens", sa.Integer))


def downgrade() -> None:
    """Bring the schema back."""
    op.drop_column("results", "cached_tokens")
