"""An ended job stays in its state, and a fence never falls: what a stale save of an ORM would write
is refused, where heads and relays would fail at the attempts and results that are there already.

Each step may come again after a migration that was killed.
"""

from __future__ import annotations

from alembic import op

revision = "0038"
down_revision = "0037"
branch_labels = None
depends_on = None

REFUSE = """
CREATE OR REPLACE FUNCTION shardline_refuse_revival() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'check_violation',
        CONSTRAINT = 'jobs_ends_are_final', TABLE = 'jobs',
        MESSAGE = CASE WHEN OLD.finished_at IS NULL
            THEN format('the fence of job %s is %s and cannot become %s: save no columns but those '
                'that you change', OLD.id, OLD.fence, NEW.fence)
            ELSE format('job %s is %s and cannot change: run it again with `shardline retry`, '
                'or insert a new job', OLD.id, OLD.state) END;
END
$$
"""
DROP = "DROP TRIGGER IF EXISTS shardline_ends_are_final ON jobs"
# Before the row is written, so that no other trigger acts on what is refused.
CREATE = """
CREATE TRIGGER shardline_ends_are_final BEFORE UPDATE ON jobs FOR EACH ROW
    WHEN ((OLD.finished_at IS NOT NULL AND NEW.state <> OLD.state) OR NEW.fence < OLD.fence)
    EXECUTE FUNCTION shardline_refuse_revival()
"""


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.execute(REFUSE)
    op.execute(DROP)
    op.execute(CREATE)


def downgrade() -> None:
    """Bring the schema back."""
    op.execute(DROP)
    op.execute("DROP FUNCTION IF EXISTS shardline_refuse_revival()")
