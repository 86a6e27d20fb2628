"""Roles of tenants: a connection of one sees and inserts its tenant's rows alone. What triggers
write they write as the owner, so that a role needs no right on quotas, shares and webhooks.

Each step may come again after a migration that was killed.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0030"
branch_labels = None
depends_on = None

TRIGGERS = (
    *("accept_jobs", "move_job", "ended_job", "ended_batch"),
    *("join_parents", "call_children"),
)

# Who connected counts beside who it acts as: SET ROLE opens nothing.
MY_TENANT = """
CREATE OR REPLACE FUNCTION shardline_my_tenant(acting name) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT tenant_id FROM tenant_roles WHERE role_name IN (acting, session_user)
    ORDER BY role_name <> acting LIMIT 1
$$
"""

# Temporary tables of the caller's come last.
AS_OWNER = """
DO $$ BEGIN
    EXECUTE format('ALTER FUNCTION {function} SECURITY DEFINER SET search_path = %I, pg_temp',
        current_schema());
END $$
"""

MINE = "coalesce({tenant} = (SELECT shardline_my_tenant(current_user)), true)"
"""True for a role of no tenant."""
POLICIES = {
    "jobs": MINE.format(tenant="tenant_id"),
    "results": "(SELECT shardline_my_tenant(current_user)) IS NULL"
    " OR EXISTS (SELECT FROM jobs WHERE jobs.id = job_id)",
}

# A view reads as its owner: it needs the rule in its own text, before any function of its reader's.
DECISIONS = f"""
CREATE OR REPLACE VIEW decisions WITH (security_barrier) AS
SELECT jobs.id AS job_id, jobs.tenant_id, jobs.model, jobs.state, jobs.created_at, jobs.metadata,
    jobs.params #>> '{{question,name}}' AS name, jobs.params #>> '{{question,type}}' AS type,
    results.choice, results.probability, results.confidence, results.score,
    results.probabilities, results.label_mass, jobs.error
FROM jobs LEFT JOIN results ON results.job_id = jobs.id
WHERE jobs.params -> 'question' IS NOT NULL AND {MINE.format(tenant="jobs.tenant_id")}
"""  # noqa: S608 (constants of ours)


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.create_table(
        "tenant_roles",
        sa.Column("role_name", sa.Text, primary_key=True),
        sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
        sa.Column(
            "created_at",
            sa.TIMESTAMP(timezone=True),
            nullable=False,
            server_default=sa.text("now()"),
        ),
        if_not_exists=True,
    )
    op.execute(MY_TENANT)
    op.execute(AS_OWNER.format(function="shardline_my_tenant(name)"))
    for name in TRIGGERS:
        op.execute(AS_OWNER.format(function=f"shardline_{name}()"))
        # Nobody hangs it on a table of its own.
        op.execute(f"REVOKE EXECUTE ON FUNCTION shardline_{name}() FROM PUBLIC")
    for table, rule in POLICIES.items():
        op.execute(f"DROP POLICY IF EXISTS shardline_tenants ON {table}")
        op.execute(f"CREATE POLICY shardline_tenants ON {table} USING ({rule})")
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    op.execute(DECISIONS)
    own = "coalesce(shardline_my_tenant(current_user), 'default')"
    op.execute(f"ALTER TABLE jobs ALTER COLUMN tenant_id SET DEFAULT {own}")


def downgrade() -> None:
    """Bring the schema back to the revision before."""
    op.execute("ALTER TABLE jobs ALTER COLUMN tenant_id SET DEFAULT 'default'")
    view = DECISIONS.replace(" WITH (security_barrier)", "").partition(" AND coalesce")[0]
    op.execute("DROP VIEW IF EXISTS decisions")
    op.execute(view)
    for table in POLICIES:
        op.execute(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")
        op.execute(f"DROP POLICY IF EXISTS shardline_tenants ON {table}")
    for name in TRIGGERS:
        function = f"FUNCTION shardline_{name}()"
        op.execute(f"ALTER {function} SECURITY INVOKER RESET search_path")
        op.execute(f"GRANT EXECUTE ON {function} TO PUBLIC")
    op.execute("DROP FUNCTION IF EXISTS shardline_my_tenant(name)")
    op.execute("DROP TABLE IF EXISTS tenant_roles")
