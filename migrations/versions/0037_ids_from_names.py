"""A tenant's role of Postgres names no UUID of version 8: those follow from the names of others'
requests at Celery and Redis.

Each step may come again after a migration that was killed.
"""

from __future__ import annotations

from alembic import op

revision = "0037"
down_revision = "0036"
branch_labels = None
depends_on = None

DROP = "DROP POLICY IF EXISTS shardline_no_ids_of_version_8 ON jobs"
# Beside that of revision 0032. Rows that relays made for the tenant may be updated all the same.
CREATE = """
CREATE POLICY shardline_no_ids_of_version_8 ON jobs AS RESTRICTIVE FOR INSERT WITH CHECK (
    (SELECT shardline_my_tenant(current_user)) IS NULL OR substr(id::text, 15, 1) <> '8')
"""


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.execute(DROP)
    op.execute(CREATE)


def downgrade() -> None:
    """Bring the schema back."""
    op.execute(DROP)
