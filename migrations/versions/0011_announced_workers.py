"""Workers that are about to join: they have no profile yet."""

from __future__ import annotations

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema to this revision."""
    for column in ("shapes", "profile"):
        op.alter_column("workers", column, nullable=True)


def downgrade() -> None:
    """Bring the schema back."""
    op.execute("DELETE FROM workers WHERE profile IS NULL")
    for column in ("shapes", "profile"):
        op.alter_column("workers", column, nullable=False)
