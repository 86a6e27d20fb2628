"""Doors and claims know how long a sequence a pipeline's KV holds."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.add_column("pipelines", sa.Column("kv_tokens", sa.BigInteger))


def downgrade() -> None:
    """Bring the schema back."""
    op.drop_column("pipelines", "kv_tokens")
