"""Workers of a fleet answer each other at an address, to measure the links between their
machines."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema to this revision."""
    for column in ("machine", "address"):
        op.add_column("workers", sa.Column(column, sa.Text))


def downgrade() -> None:
    """Bring the schema back."""
    for column in ("machine", "address"):
        op.drop_column("workers", column)
