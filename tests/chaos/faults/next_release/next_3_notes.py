"""What a next release might add to attempts, for tests. A step of its own: no step locks two
tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "9003"
down_revision = "9002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.add_column("attempts", sa.Column("note", sa.Text(), server_default="", nullable=True))


def downgrade() -> None:
    """Bring the schema back."""
    op.drop_column("attempts", "note")
