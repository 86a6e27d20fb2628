"""Lists by state and by model walk an index in their order, whoever's jobs they are."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

INDEXES = {
    "jobs_by_state": (["tenant_id", "state", "created_at", "id"], None),
    "jobs_by_model": (["tenant_id", "model", "state", "created_at", "id"], None),
    "jobs_dead_by_model": (
        ["model", "finished_at", "id"],
        "state = 'failed' AND (error ->> 'code') = 'crashed'",
    ),
}


def upgrade() -> None:
    """Bring the schema to this revision."""
    with op.get_context().autocommit_block():
        _drop_indexes()
        for name, (columns, where) in INDEXES.items():
            rule = None if where is None else sa.text(where)
            op.create_index(
                name, "jobs", columns, postgresql_where=rule, postgresql_concurrently=True
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
