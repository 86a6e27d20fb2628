"""Relays borrow a row while they tokenize it, instead of locking it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema to this revision. Relays of the last release know nothing of it, and harm
    nothing."""
    op.add_column("jobs", sa.Column("preparing_until", sa.DateTime(timezone=True)))


def downgrade() -> None:
    """Bring the schema back."""
    op.drop_column("jobs", "preparing_until")
