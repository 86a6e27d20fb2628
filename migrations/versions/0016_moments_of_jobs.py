"""A job's `created_at` is a moment that every reader has: rows of SQL could say infinity, and no
list was read then."""

from __future__ import annotations

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

EARLY = "UPDATE jobs SET created_at = now() WHERE created_at < '1970-01-01 00:00:00+00'"
LATE = "UPDATE jobs SET created_at = now() WHERE created_at >= '9999-12-31 00:00:00+00'"
RULE = "created_at >= '1970-01-01 00:00:00+00' AND created_at < '9999-12-31 00:00:00+00'"
NAME = "jobs_created_at_is_between_1970_and_9999"


def upgrade() -> None:
    """Bring the schema to this revision."""
    # Found by the index of lists. A later change of such a row would break the rule, and its
    # statement with it.
    op.execute(EARLY)
    op.execute(LATE)
    op.execute(f"ALTER TABLE jobs ADD CONSTRAINT {NAME} CHECK ({RULE}) NOT VALID")
    # Looks at every row, beside those who write.
    with op.get_context().autocommit_block():
        op.execute(f"ALTER TABLE jobs VALIDATE CONSTRAINT {NAME}")


def downgrade() -> None:
    """Bring the schema back."""
    op.drop_constraint(NAME, "jobs")
