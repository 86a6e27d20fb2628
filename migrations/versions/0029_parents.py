"""Jobs wait for other jobs: their parents, which of these are open, and triggers that tell relays
when one has ended."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import UUID

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None

FUNCTIONS = Path(__file__).parents[1] / "functions"

COLUMNS = (
    "depends_on jsonb",
    "on_parent_failure text NOT NULL DEFAULT 'fail'",
    "released_at timestamptz",
)
RULES = {
    "jobs_depends_on_is_an_array_of_1_to_64": (
        "CASE WHEN jsonb_typeof(depends_on) = 'array'"
        " THEN jsonb_array_length(depends_on) BETWEEN 1 AND 64 ELSE depends_on IS NULL END"
    ),
    "jobs_on_parent_failure_is_known": "on_parent_failure IN ('fail', 'run')",
    "jobs_parents_end_before_it_is_prepared": (
        "prepared_at IS NULL OR depends_on IS NULL OR released_at IS NOT NULL"
    ),
}
WAITS = "state = 'queued' AND depends_on IS NOT NULL AND released_at IS NULL"
TO_PREPARE = (
    "CREATE INDEX CONCURRENTLY jobs_to_prepare_new ON jobs (created_at)"
    " WHERE state = 'queued' AND prepared_at IS NULL{rule}"
)
IS_READY = " AND (depends_on IS NULL OR released_at IS NOT NULL)"

# They write as their owner: producers that speak SQL need no right on `parents_of_jobs`.
AS_OWNER = """
DO $$ BEGIN
    EXECUTE format('ALTER FUNCTION shardline_{name}()'
        ' SECURITY DEFINER SET search_path = %I, pg_temp', current_schema());
END $$
"""

TRIGGERS = {
    "shardline_join_parents": (
        "AFTER INSERT ON jobs FOR EACH ROW WHEN (NEW.depends_on IS NOT NULL)"
        " EXECUTE FUNCTION shardline_join_parents()"
    ),
    "shardline_call_children": (
        "AFTER UPDATE OF state ON jobs FOR EACH ROW"
        " WHEN (OLD.finished_at IS NULL AND NEW.finished_at IS NOT NULL)"
        " EXECUTE FUNCTION shardline_call_children()"
    ),
    "shardline_orphan_children": (
        "AFTER DELETE ON jobs FOR EACH ROW WHEN (OLD.finished_at IS NULL)"
        " EXECUTE FUNCTION shardline_call_children()"
    ),
}


def upgrade() -> None:
    """Bring the schema to this revision. Each step may come again after a kill."""
    for column in COLUMNS:
        op.execute(f"ALTER TABLE jobs ADD COLUMN IF NOT EXISTS {column}")
    for name, rule in RULES.items():
        op.execute(f"ALTER TABLE jobs DROP CONSTRAINT IF EXISTS {name}")
        op.execute(f"ALTER TABLE jobs ADD CONSTRAINT {name} CHECK ({rule}) NOT VALID")
    _create_parents()
    op.execute("DROP FUNCTION IF EXISTS shardline_measure")
    op.execute((FUNCTIONS / "0029_parents.sql").read_text(encoding="utf-8"))
    for name in ("join_parents", "call_children"):
        op.execute(AS_OWNER.format(name=name))
        op.execute(f"REVOKE EXECUTE ON FUNCTION shardline_{name}() FROM PUBLIC")
    for name, rest in TRIGGERS.items():
        op.execute(f"DROP TRIGGER IF EXISTS {name} ON jobs")
        op.execute(f"CREATE TRIGGER {name} {rest}")
    with op.get_context().autocommit_block():
        for name in RULES:
            op.execute(f"ALTER TABLE jobs VALIDATE CONSTRAINT {name}")
        _replace_index(TO_PREPARE.format(rule=IS_READY))
        op.execute("SET lock_timeout = 0")
        op.execute("DROP INDEX CONCURRENTLY IF EXISTS jobs_waiting")
        op.execute(f"CREATE INDEX CONCURRENTLY jobs_waiting ON jobs (model) WHERE {WAITS}")
        op.execute("RESET lock_timeout")


def downgrade() -> None:
    """Bring the schema back. What waits runs at once, with the placeholders in its texts."""
    with op.get_context().autocommit_block():
        op.execute("DROP INDEX CONCURRENTLY IF EXISTS jobs_waiting")
        _replace_index(TO_PREPARE.format(rule=""))
    for name in TRIGGERS:
        op.execute(f"DROP TRIGGER IF EXISTS {name} ON jobs")
    for name in ("join_parents", "call_children", "measure"):
        op.execute(f"DROP FUNCTION IF EXISTS shardline_{name}")
    op.execute((FUNCTIONS / "0026_quotas.sql").read_text(encoding="utf-8"))
    op.execute("DROP TABLE IF EXISTS parents_of_jobs")
    for name in RULES:
        op.execute(f"ALTER TABLE jobs DROP CONSTRAINT IF EXISTS {name}")
    for column in COLUMNS:
        op.execute(f"ALTER TABLE jobs DROP COLUMN IF EXISTS {column.split()[0]}")


def _replace_index(index: str) -> None:
    """Nobody waits for one who makes an index concurrently: so it may wait as long as it takes."""
    op.execute("SET lock_timeout = 0")
    op.execute("DROP INDEX CONCURRENTLY IF EXISTS jobs_to_prepare_new")
    op.execute(index)
    op.execute("DROP INDEX CONCURRENTLY IF EXISTS jobs_to_prepare")
    op.execute("ALTER INDEX jobs_to_prepare_new RENAME TO jobs_to_prepare")
    op.execute("RESET lock_timeout")


def _create_parents() -> None:
    op.create_table(
        "parents_of_jobs",
        sa.Column(
            "job_id",
            UUID(as_uuid=True),
            sa.ForeignKey("jobs.id", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("parent_id", UUID(as_uuid=True), primary_key=True),
        sa.Column("state", sa.Text, nullable=False, server_default=sa.text("'due'")),
        sa.CheckConstraint(
            "state IN ('due', 'open', 'succeeded', 'failed')",
            name=op.f("parents_of_jobs_state_is_known"),
        ),
        # Of a migration that was killed: jobs may wait by it already.
        if_not_exists=True,
    )
    for name, column, where in (("parents", "parent_id", None), ("due", "job_id", "state = 'due'")):
        op.create_index(
            f"parents_of_jobs_{name}",
            "parents_of_jobs",
            [column],
            postgresql_where=where and sa.text(where),
            if_not_exists=True,
        )
