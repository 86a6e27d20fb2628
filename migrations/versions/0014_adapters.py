"""Models have adapters: heads say which, so that doors take jobs for them and refuse others by
name."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.add_column(
        "models",
        sa.Column("adapters", postgresql.JSONB, nullable=False, server_default=sa.text("'{}'")),
    )


def downgrade() -> None:
    """Bring the schema back."""
    op.drop_column("models", "adapters")
