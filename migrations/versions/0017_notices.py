"""Relays announce the first deletion of ended jobs, and remember when they did."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.create_table(
        "notices",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column(
            "made_at", sa.TIMESTAMP(timezone=True), nullable=False, server_default=sa.text("now()")
        ),
    )


def downgrade() -> None:
    """Bring the schema back to the revision before."""
    op.drop_table("notices")
