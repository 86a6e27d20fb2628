"""A tenant's jobs are listed without reading those of others."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema to this revision."""
    with op.get_context().autocommit_block():
        _drop_index()
        op.create_index("jobs_of_tenants", "jobs", ["tenant_id", "created_at", "id"], postgresql_concurrently=True)
        op.execute("RESET lock_timeout")


def downgrade() -> None:
    """Bring the schema back."""
    with op.get_context().autocommit_block():
        _drop_index()
        op.execute("RESET lock_timeout")


def _drop_index() -> None:
    """Also what a try that was cut short left behind. Nobody waits for one who makes an index concurrently: so it may
    wait as long as it takes."""
    op.execute("SET lock_timeout = 0")
    op.drop_index("jobs_of_tenants", table_name="jobs", if_exists=True, postgresql_concurrently=True)
