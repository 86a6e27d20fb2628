"""A chat's result has what the model thought and what it called."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

COLUMNS = {"reasoning": sa.Text, "reasoning_tokens": sa.Integer, "tool_calls": JSONB}


def upgrade() -> None:
    """Bring the schema to this revision."""
    for name, kind in COLUMNS.items():
        op.add_column("results", sa.Column(name, kind))


def downgrade() -> None:
    """Bring the schema back to the revision before."""
    for name in COLUMNS:
        op.drop_column("results", name)
