"""An index on the new column, for tests: made while jobs are written."""

from __future__ import annotations

from alembic import op

revision = "9002"
down_revision = "9001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema to this revision."""
    with op.get_context().autocommit_block():
        _drop_index()
        op.create_index("jobs_labels", "jobs", ["label"], postgresql_concurrently=True)
        op.execute("RESET lock_timeout")


def downgrade() -> None:
    """Bring the schema back."""
    with op.get_context().autocommit_block():
        _drop_index()
        op.execute("RESET lock_timeout")


def _drop_index() -> None:
    op.execute("SET lock_timeout = 0")
    op.drop_index("jobs_labels", table_name="jobs", if_exists=True, postgresql_concurrently=True)
