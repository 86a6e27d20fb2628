"""Dead letters are listed, and replays found, without reading the whole table."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

DEAD = "state = 'failed' AND (error ->> 'code') = 'crashed'"


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.create_index("jobs_dead", "jobs", ["finished_at", "id"], unique=False, postgresql_where=sa.text(DEAD))
    op.create_index(
        "jobs_replays", "jobs", ["replay_of"], unique=False, postgresql_where=sa.text("replay_of IS NOT NULL")
    )


def downgrade() -> None:
    """Bring the schema back."""
    op.drop_index("jobs_replays", table_name="jobs")
    op.drop_index("jobs_dead", table_name="jobs")
