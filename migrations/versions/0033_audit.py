"""The audit log: a row for each administrative act, written by triggers in the transaction that
does it, as the owner: whoever acts needs no right on the log.

Each step may come again after a migration that was killed.
"""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSON

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None

FUNCTIONS = Path(__file__).parents[1] / "functions/0033_audit.sql"

# What it is called, the columns of its id, of its tenant, those that are shown, and those of which
# only a change is. A URL may have a token in it.
AUDITED = {
    "api_keys": (
        *("key", "id", "tenant_id"),
        *("name,tenant_id,scopes,expires_at,replaced_at,revoked_at", "digest"),
    ),
    "tenants": ("tenant", "id", "id", "weight", ""),
    "quotas": (
        *("quota", "tenant_id,key_name", "tenant_id"),
        "requests_per_min,tokens_per_min,max_running,max_queued,max_bytes,"
        "budget_tokens,budget_money,budget_period",
        "",
    ),
    "prices": ("price", "model", "", "input_price,output_price", ""),
    "pauses": ("pause", "kind,target", "", "reason", ""),
    "schedules": (
        *("schedule", "id", "tenant_id"),
        *("name,cron,time_zone,catch_up,paused,key_name", "request"),
    ),
    "webhook_endpoints": (
        *("webhook endpoint", "id", "tenant_id"),
        *("name,event_types,disabled_reason", "url,secret"),
    ),
    "tenant_roles": ("role", "role_name", "tenant_id", "tenant_id", ""),
    "models": (
        *("model", "name", ""),
        *("revision,context_length,vocab_size,fingerprint,adapters,encoder", "chat_template"),
    ),
    "plans": ("plan", "model", "", "version,split", ""),
}

FUNCTION_NAMES = ("audit()", "audit_jobs(bigint, text, text, json, bigint)")

AS_OWNER = """
DO $$ BEGIN
    EXECUTE format('ALTER FUNCTION {function} SECURITY DEFINER SET search_path = %I, pg_temp',
        current_schema());
END $$
"""


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger, sa.Identity(always=True), primary_key=True),
        sa.Column(
            "at", sa.TIMESTAMP(timezone=True), nullable=False, server_default=sa.text("now()")
        ),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("actor", "role_name")),
        sa.Column("tenant_id", sa.Text),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("act", "object_kind", "object_id")),
        sa.Column("change", JSON, nullable=False),
        if_not_exists=True,
    )
    op.create_index("audit_listing", "audit", ["at", "id"], if_not_exists=True)
    op.execute(FUNCTIONS.read_text(encoding="utf-8"))
    for name in FUNCTION_NAMES:
        op.execute(AS_OWNER.format(function=f"shardline_{name}"))
    # Nobody hangs it on a table of its own.
    op.execute("REVOKE EXECUTE ON FUNCTION shardline_audit() FROM PUBLIC")
    for table, said in AUDITED.items():
        arguments = ", ".join(f"'{one}'" for one in said)
        # What relays, heads and doors write all the time is none of it.
        columns = ",".join(one for one in said[3:] if one)
        op.execute(f"DROP TRIGGER IF EXISTS shardline_audit ON {table}")
        op.execute(
            "CREATE TRIGGER shardline_audit"
            f" AFTER INSERT OR DELETE OR UPDATE OF {columns} ON {table}"
            f" FOR EACH ROW EXECUTE FUNCTION shardline_audit({arguments})"
        )


def downgrade() -> None:
    """Bring the schema back to the revision before."""
    for table in AUDITED:
        op.execute(f"DROP TRIGGER IF EXISTS shardline_audit ON {table}")
    for name in (*FUNCTION_NAMES, "audited(anyelement, text[])", "actor()"):
        op.execute(f"DROP FUNCTION IF EXISTS shardline_{name}")
    op.drop_table("audit", if_exists=True)
