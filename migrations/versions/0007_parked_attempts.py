"""Attempts that wait in their head for KV say so: a head that dies is no crash of theirs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.add_column(
        "attempts", sa.Column("parked", sa.Boolean, nullable=False, server_default=sa.false())
    )


def downgrade() -> None:
    """Bring the schema back."""
    op.drop_column("attempts", "parked")
