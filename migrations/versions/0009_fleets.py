"""Workers that hold no layers of their own choice, and the plan that gives them some."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.create_table(
        "workers",
        sa.Column("worker", sa.Text, primary_key=True),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("shapes", JSONB, nullable=False),
        sa.Column("profile", JSONB, nullable=False),
        sa.Column(
            "joined_at", sa.TIMESTAMP(timezone=True), nullable=False, server_default=sa.func.now()
        ),
        sa.Column("lease_until", sa.TIMESTAMP(timezone=True), nullable=False),
    )
    op.create_table(
        "plans",
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("version", sa.BigInteger, nullable=False, server_default=sa.text("1")),
        sa.Column("split", JSONB, nullable=False),
        sa.Column("stages", JSONB, nullable=False),
        sa.Column("tokens_per_s", sa.Double),
        sa.Column(
            "made_at", sa.TIMESTAMP(timezone=True), nullable=False, server_default=sa.func.now()
        ),
    )


def downgrade() -> None:
    """Bring the schema back."""
    op.drop_table("plans")
    op.drop_table("workers")
