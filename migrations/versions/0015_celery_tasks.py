"""Tasks of the Celery door: their own ids, what follows them, and a trigger that tells relays when
their jobs end."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB, UUID

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

# Every writer of an end passes here, heads of the release before too. Jobs of other doors cost a
# look at an index.
ENDED_JOB = """
CREATE FUNCTION shardline_ended_job() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE celery_tasks SET due_at = now() WHERE job_id = NEW.id AND settled_at IS NULL;
    IF FOUND THEN
        PERFORM pg_notify('shardline_tasks', '');
    END IF;
    RETURN NULL;
END
$$;
"""

ENDED_JOB_TRIGGER = """
CREATE TRIGGER shardline_ended_job AFTER UPDATE OF state ON jobs FOR EACH ROW
    WHEN (OLD.finished_at IS NULL AND NEW.finished_at IS NOT NULL)
    EXECUTE FUNCTION shardline_ended_job();
"""


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.create_table(
        "celery_tasks",
        sa.Column("task_id", sa.Text, primary_key=True),
        sa.Column("job_id", UUID(as_uuid=True), sa.ForeignKey("jobs.id", ondelete="CASCADE")),
        sa.Column("request", sa.Text),
        sa.Column("error", JSONB),
        sa.Column(
            "created_at", sa.TIMESTAMP(timezone=True), nullable=False, server_default=sa.func.now()
        ),
        sa.Column("expires_at", sa.TIMESTAMP(timezone=True)),
        sa.Column("revoked_at", sa.TIMESTAMP(timezone=True)),
        sa.Column("due_at", sa.TIMESTAMP(timezone=True)),
        sa.Column("num_failures", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("settled_at", sa.TIMESTAMP(timezone=True)),
        sa.CheckConstraint(
            "length(task_id) BETWEEN 1 AND 256", name="task_id_is_1_to_256_characters"
        ),
    )
    for name, column, where in (
        ("celery_tasks_jobs", "job_id", None),
        ("celery_tasks_due", "due_at", "due_at IS NOT NULL"),
        ("celery_tasks_expiring", "expires_at", "expires_at IS NOT NULL"),
        ("celery_tasks_without_job", "created_at", "job_id IS NULL"),
    ):
        op.create_index(name, "celery_tasks", [column], postgresql_where=where and sa.text(where))
    op.execute(ENDED_JOB)
    op.execute(ENDED_JOB_TRIGGER)


def downgrade() -> None:
    """Bring the schema back."""
    op.execute("DROP TRIGGER shardline_ended_job ON jobs")
    op.execute("DROP FUNCTION shardline_ended_job()")
    op.drop_table("celery_tasks")
