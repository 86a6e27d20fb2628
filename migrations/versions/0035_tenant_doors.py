"""Users of the broker that belong to a tenant, so that relays know whose streams and queues to
read; the audit log has them.

Each step may come again after a migration that was killed.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.create_table(
        "tenant_doors",
        sa.Column("user_name", sa.Text, primary_key=True),
        sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
        sa.Column(
            "created_at",
            sa.TIMESTAMP(timezone=True),
            nullable=False,
            server_default=sa.text("now()"),
        ),
        if_not_exists=True,
    )
    op.execute("DROP TRIGGER IF EXISTS shardline_audit ON tenant_doors")
    op.execute(
        "CREATE TRIGGER shardline_audit"
        " AFTER INSERT OR DELETE OR UPDATE OF tenant_id ON tenant_doors FOR EACH ROW"
        " EXECUTE FUNCTION"
        " shardline_audit('broker user', 'user_name', 'tenant_id', 'tenant_id', '')"
    )


def downgrade() -> None:
    """Bring the schema back to the revision before."""
    op.drop_table("tenant_doors", if_exists=True)
