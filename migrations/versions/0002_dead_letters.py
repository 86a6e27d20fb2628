"""Dead letters are listed, and replays found, without reading the whole table."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

INDEXES = {
    "jobs_dead": (["finished_at", "id"], "state = 'failed' AND (error ->> 'code') = 'crashed'"),
    "jobs_replays": (["replay_of"], "replay_of IS NOT NULL"),
}


def upgrade() -> None:
    """Bring the schema to this revision."""
    with op.get_context().autocommit_block():
        _drop_indexes()
        for name, (columns, where) in INDEXES.items():
            op.create_index(
                name, "jobs", columns, postgresql_where=sa.text(where), postgresql_concurrently=True
            )
        op.execute("RESET lock_timeout")


def downgrade() -> None:
    """Bring the schema back."""
    with op.get_context().autocommit_block():
        _drop_indexes()
        op.execute("RESET lock_timeout")


def _drop_indexes() -> None:
    """Also what a try that was cut short left behind. Nobody waits for one who makes an index
    concurrently: so it may wait as long as it takes."""
    op.execute("SET lock_timeout = 0")
    for name in INDEXES:
        op.drop_index(name, table_name="jobs", if_exists=True, postgresql_concurrently=True)
