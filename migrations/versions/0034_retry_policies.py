"""A job's retry policy: how often its failed attempts are tried again, and after which wait.

Each step may come again after a migration that was killed.
"""

from __future__ import annotations

from alembic import op

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None

RULE = "jobs_retry_is_an_object"

# Roles of tenants may write what else they may say of a job.
GRANT = """
DO $$ DECLARE role name; BEGIN
    FOR role IN SELECT role_name FROM tenant_roles JOIN pg_roles ON rolname = role_name LOOP
        EXECUTE format('GRANT INSERT (retry) ON jobs TO %I', role);
    END LOOP;
END $$
"""


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.execute("ALTER TABLE jobs ADD COLUMN IF NOT EXISTS retry jsonb")
    op.execute(f"ALTER TABLE jobs DROP CONSTRAINT IF EXISTS {RULE}")
    rule = "CHECK (jsonb_typeof(retry) = 'object')"
    op.execute(f"ALTER TABLE jobs ADD CONSTRAINT {RULE} {rule} NOT VALID")
    op.execute(GRANT)
    with op.get_context().autocommit_block():
        op.execute(f"ALTER TABLE jobs VALIDATE CONSTRAINT {RULE}")


def downgrade() -> None:
    """Bring the schema back: jobs have their `max_crashes` again."""
    op.execute(f"ALTER TABLE jobs DROP CONSTRAINT IF EXISTS {RULE}")
    op.execute("ALTER TABLE jobs DROP COLUMN IF EXISTS retry")
