"""Workers that may serve several models, one at a time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.add_column(
        "workers", sa.Column("further", JSONB, nullable=False, server_default=sa.text("'{}'"))
    )


def downgrade() -> None:
    """Bring the schema back."""
    op.drop_column("workers", "further")
