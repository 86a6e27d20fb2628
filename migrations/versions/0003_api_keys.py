"""API keys. Gateways of this release refuse whoever has none: make one before they are upgraded."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("scopes", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column(
            "created_at",
            sa.TIMESTAMP(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("expires_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("replaced_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("last_used_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.CheckConstraint(
            "length(name) BETWEEN 1 AND 64", name=op.f("api_keys_name_is_1_to_64_characters")
        ),
        sa.CheckConstraint("octet_length(digest) = 32", name=op.f("api_keys_digest_is_a_sha256")),
        sa.CheckConstraint(
            "scopes <@ ARRAY['submit', 'read', 'cancel', 'admin']",
            name=op.f("api_keys_scopes_are_known"),
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("api_keys_tenant_id_fkey")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("api_keys_pkey")),
    )
    op.create_index(
        "api_keys_names",
        "api_keys",
        ["name"],
        unique=True,
        postgresql_where=sa.text("replaced_at IS NULL AND revoked_at IS NULL"),
    )


def downgrade() -> None:
    """Bring the schema back."""
    op.drop_table("api_keys")
