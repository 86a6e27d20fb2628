"""A new prompt of a job that was tokenized is refused, where it would have no effect. TRUNCATE jobs
gives back what the jobs had reserved of quotas.

Each step may come again after a migration that was killed.
"""

from __future__ import annotations

from alembic import op

revision = "0039"
down_revision = "0038"
branch_labels = None
depends_on = None

FUNCTIONS = (
    """
CREATE OR REPLACE FUNCTION shardline_refuse_edit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'check_violation',
        CONSTRAINT = 'jobs_prompts_are_final', TABLE = 'jobs',
        MESSAGE = format('job %s was tokenized and keeps its prompt: cancel it, and insert another',
            OLD.id);
END
$$
""",
    """
CREATE OR REPLACE FUNCTION shardline_forget_reservations() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    used quota_use;
    quota bigint;
BEGIN
    FOR quota IN SELECT quota_id FROM quota_use ORDER BY quota_id LOOP
        used := shardline_fold_quota(quota);
        used.queued := 0;
        used.bytes := 0;
        used.open_tokens := 0;
        used.open_money := 0;
        PERFORM shardline_write_quota(used);
    END LOOP;
    DELETE FROM reservations;
    RETURN NULL;
END
$$
""",
)
TRIGGERS = {
    "shardline_prompts_are_final": """
BEFORE UPDATE OF prompt, messages ON jobs FOR EACH ROW
    WHEN (OLD.prepared_at IS NOT NULL AND OLD.finished_at IS NULL
        AND (NEW.prompt, NEW.messages) IS DISTINCT FROM (OLD.prompt, OLD.messages))
    EXECUTE FUNCTION shardline_refuse_edit()
""",
    "shardline_truncated": """
AFTER TRUNCATE ON jobs FOR EACH STATEMENT EXECUTE FUNCTION shardline_forget_reservations()
""",
}


def upgrade() -> None:
    """Bring the schema to this revision."""
    for function in FUNCTIONS:
        op.execute(function)
    for name, rest in TRIGGERS.items():
        op.execute(f"DROP TRIGGER IF EXISTS {name} ON jobs")
        op.execute(f"CREATE TRIGGER {name} {rest}")


def downgrade() -> None:
    """Bring the schema back."""
    for name in TRIGGERS:
        op.execute(f"DROP TRIGGER IF EXISTS {name} ON jobs")
    for name in ("refuse_edit", "forget_reservations"):
        op.execute(f"DROP FUNCTION IF EXISTS shardline_{name}()")
