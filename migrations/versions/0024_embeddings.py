"""Results have the vector of a text; models say what they make of one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.add_column("results", sa.Column("embedding", ARRAY(sa.REAL)))
    op.add_column("models", sa.Column("encoder", JSONB))


def downgrade() -> None:
    """Bring the schema back to the revision before."""
    op.drop_column("results", "embedding")
    op.drop_column("models", "encoder")
