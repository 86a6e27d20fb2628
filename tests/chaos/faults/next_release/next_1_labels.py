"""What a next release might add to jobs, for tests: a column with a default."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import op

VERSIONS = Path(__file__).parents[4] / "migrations" / "versions"

revision = "9001"
down_revision = max(path.name.partition("_")[0] for path in VERSIONS.glob("[0-9]*.py"))
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.add_column("jobs", sa.Column("label", sa.Text(), server_default="none", nullable=True))


def downgrade() -> None:
    """Bring the schema back."""
    op.drop_column("jobs", "label")
