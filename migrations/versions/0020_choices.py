"""Choices of one request know their first one, and completions that OpenAI's lists show are marked.

Each step may come again after a migration that was killed.
"""

from __future__ import annotations

from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

COLUMNS = {"choice_of": "uuid", "choice_index": "smallint", "stored": "jsonb"}
RULES = {
    "jobs_choice_of_has_an_index": "num_nonnulls(choice_of, choice_index) <> 1",
    "jobs_choice_index_is_not_negative": "choice_index >= 0",
    "jobs_stored_is_an_object": "jsonb_typeof(stored) = 'object'",
}
INDEXES = {
    "jobs_choices": "UNIQUE INDEX {} ON jobs (choice_of, choice_index) WHERE choice_of IS NOT NULL",
    "jobs_stored": "INDEX {} ON jobs (tenant_id, created_at, id) WHERE stored IS NOT NULL",
    "jobs_stored_by_model": "INDEX {} ON jobs (tenant_id, model, created_at, id)"
    " WHERE stored IS NOT NULL",
    "jobs_stored_metadata": "INDEX {} ON jobs USING gin (metadata jsonb_path_ops)"
    " WHERE stored IS NOT NULL",
}


def upgrade() -> None:
    """Bring the schema to this revision."""
    for name, kind in COLUMNS.items():
        op.execute(f"ALTER TABLE jobs ADD COLUMN IF NOT EXISTS {name} {kind}")
    for name, rule in RULES.items():
        op.execute(f"ALTER TABLE jobs DROP CONSTRAINT IF EXISTS {name}")
        op.execute(f"ALTER TABLE jobs ADD CONSTRAINT {name} CHECK ({rule}) NOT VALID")
    with op.get_context().autocommit_block():
        for name in RULES:
            op.execute(f"ALTER TABLE jobs VALIDATE CONSTRAINT {name}")
        _drop_indexes()
        for name, index in INDEXES.items():
            op.execute("CREATE " + index.replace("INDEX {}", f"INDEX CONCURRENTLY {name}"))
        op.execute("RESET lock_timeout")


def downgrade() -> None:
    """Bring the schema back."""
    with op.get_context().autocommit_block():
        _drop_indexes()
        op.execute("RESET lock_timeout")
    for name in COLUMNS:
        op.execute(f"ALTER TABLE jobs DROP COLUMN IF EXISTS {name}")


def _drop_indexes() -> None:
    """Also what a try that was cut short left behind. Nobody waits for one who makes an index
    concurrently: so it may wait as long as it takes."""
    op.execute("SET lock_timeout = 0")
    for name in INDEXES:
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {name}")
