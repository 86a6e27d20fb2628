"""Tenants have quotas, weights and prices: what jobs reserve when they are accepted, and settle as
they end.

Each step may come again after a migration that was killed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY, UUID

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

FUNCTIONS = Path(__file__).parents[1] / "functions/0026_quotas.sql"

COLUMNS = {
    "tenants": "weight double precision NOT NULL DEFAULT 1",
    "jobs": "key_name text",
    "batches": "key_name text",
}
RULES = {
    "tenants_weight_is_positive": ("tenants", "weight > 0 AND weight <= 1000000"),
    "jobs_key_name_is_1_to_64_characters": ("jobs", "length(key_name) BETWEEN 1 AND 64"),
}
TABLES = (
    *("reservations", "quota_changes", "quota_use", "quotas", "prices"),
    *("share_changes", "tenant_shares"),
)
# Tenants stand side by side in it.
TO_SEND = (
    "CREATE INDEX CONCURRENTLY jobs_to_send_new"
    " ON jobs (model, priority, {tenant}created_at, id, not_before)"
    " WHERE state = 'queued' AND sent_at IS NULL AND prepared_at IS NOT NULL"
)
LIMITS = (
    *("requests_per_min", "tokens_per_min", "max_running", "max_queued", "max_bytes"),
    *("budget_tokens", "budget_money"),
)

TRIGGERS = {
    "shardline_accept_jobs": (
        "jobs",
        "AFTER INSERT ON jobs REFERENCING NEW TABLE AS fresh"
        " FOR EACH STATEMENT EXECUTE FUNCTION shardline_accept_jobs()",
    ),
    "shardline_move_job": (
        "jobs",
        "AFTER UPDATE OF state, prepared_at ON jobs FOR EACH ROW"
        " WHEN (OLD.finished_at IS NULL AND (OLD.state <> NEW.state"
        " OR (OLD.prepared_at IS NULL AND NEW.prepared_at IS NOT NULL)))"
        " EXECUTE FUNCTION shardline_move_job()",
    ),
    "shardline_delete_job": (
        "jobs",
        "AFTER DELETE ON jobs FOR EACH ROW"
        " WHEN (OLD.finished_at IS NULL) EXECUTE FUNCTION shardline_move_job()",
    ),
    "shardline_begin_quota": (
        "quotas",
        "AFTER INSERT ON quotas FOR EACH ROW EXECUTE FUNCTION shardline_begin_quota()",
    ),
}
FUNCTION_NAMES = (
    *(
        "accept_jobs",
        "move_job",
        "begin_quota",
        "release",
        "bytes_left",
        "reserve_each",
        "hold",
        "measure",
    ),
    *("reserve", "quota_excess", "write_quota", "fold_quota", "reserved_tokens"),
)

USAGE = """
CREATE OR REPLACE VIEW usage AS
SELECT (jobs.created_at AT TIME ZONE 'UTC')::date AS day, jobs.tenant_id, jobs.key_name, jobs.model,
    count(*) AS num_jobs,
    count(*) FILTER (WHERE jobs.choice_of IS NULL OR jobs.choice_of = jobs.id) AS num_requests,
    count(*) FILTER (WHERE jobs.state IN ('failed', 'cancelled', 'expired')) AS num_not_succeeded,
    coalesce(sum(results.prompt_tokens), 0)::bigint AS prompt_tokens,
    coalesce(sum(results.cached_tokens), 0)::bigint AS cached_tokens,
    coalesce(sum(results.completion_tokens), 0)::bigint AS completion_tokens,
    sum(results.prompt_tokens * prices.input_price
        + results.completion_tokens * prices.output_price) / 1000000 AS money
FROM jobs LEFT JOIN results ON results.job_id = jobs.id
LEFT JOIN prices ON prices.model = jobs.model
GROUP BY 1, 2, 3, 4
"""


def upgrade() -> None:
    """Bring the schema to this revision."""
    for table, column in COLUMNS.items():
        op.execute(f"ALTER TABLE {table} ADD COLUMN IF NOT EXISTS {column}")
    for name, (table, rule) in RULES.items():
        op.execute(f"ALTER TABLE {table} DROP CONSTRAINT IF EXISTS {name}")
        op.execute(f"ALTER TABLE {table} ADD CONSTRAINT {name} CHECK ({rule}) NOT VALID")
    _drop_tables()
    _create_quotas()
    _create_use()
    _create_shares()
    op.execute(FUNCTIONS.read_text(encoding="utf-8"))
    for name, (table, rest) in TRIGGERS.items():
        op.execute(f"DROP TRIGGER IF EXISTS {name} ON {table}")
        op.execute(f"CREATE TRIGGER {name} {rest}")
    op.execute(USAGE)
    with op.get_context().autocommit_block():
        for name, (table, _) in RULES.items():
            op.execute(f"ALTER TABLE {table} VALIDATE CONSTRAINT {name}")
        _replace_index(TO_SEND.format(tenant="tenant_id, "))


def downgrade() -> None:
    """Bring the schema back."""
    with op.get_context().autocommit_block():
        _replace_index(TO_SEND.format(tenant=""))
    op.execute("DROP VIEW IF EXISTS usage")
    for name, (table, _) in TRIGGERS.items():
        op.execute(f"DROP TRIGGER IF EXISTS {name} ON {table}")
    _drop_tables()
    for table, column in COLUMNS.items():
        op.execute(f"ALTER TABLE {table} DROP COLUMN IF EXISTS {column.split()[0]}")


def _replace_index(index: str) -> None:
    """Relays of the release before sort what they send meanwhile. Nobody waits for one who makes an
    index concurrently: so it may wait as long as it takes."""
    op.execute("SET lock_timeout = 0")
    op.execute("DROP INDEX CONCURRENTLY IF EXISTS jobs_to_send_new")
    op.execute(index)
    op.execute("DROP INDEX CONCURRENTLY IF EXISTS jobs_to_send")
    op.execute("ALTER INDEX jobs_to_send_new RENAME TO jobs_to_send")
    op.execute("RESET lock_timeout")


def _drop_tables() -> None:
    """With the functions that know their rows."""
    for name in FUNCTION_NAMES:
        op.execute(f"DROP FUNCTION IF EXISTS shardline_{name} CASCADE")
    op.execute("DROP VIEW IF EXISTS usage")
    for table in TABLES:
        op.execute(f"DROP TABLE IF EXISTS {table} CASCADE")


def _create_quotas() -> None:
    op.create_table(
        "quotas",
        sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), primary_key=True),
        sa.Column("key_name", sa.Text, primary_key=True, server_default=sa.text("''")),
        sa.Column("id", sa.BigInteger, sa.Identity(always=True), nullable=False, unique=True),
        sa.Column("requests_per_min", sa.Integer),
        sa.Column("tokens_per_min", sa.BigInteger),
        sa.Column("max_running", sa.Integer),
        sa.Column("max_queued", sa.Integer),
        sa.Column("max_bytes", sa.BigInteger),
        sa.Column("budget_tokens", sa.BigInteger),
        sa.Column("budget_money", sa.Numeric),
        sa.Column("budget_period", sa.Text, nullable=False, server_default=sa.text("'month'")),
        sa.CheckConstraint(
            " AND ".join(f"coalesce({name}, 0) >= 0" for name in LIMITS),
            name=op.f("quotas_limits_are_not_negative"),
        ),
        sa.CheckConstraint(
            "budget_period IN ('day', 'month', 'ever')",
            name=op.f("quotas_budget_period_is_known"),
        ),
    )
    op.create_table(
        "prices",
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("input_price", sa.Numeric, nullable=False),
        sa.Column("output_price", sa.Numeric, nullable=False),
        sa.CheckConstraint(
            "input_price >= 0 AND output_price >= 0",
            name=op.f("prices_prices_are_not_negative"),
        ),
    )


def _create_use() -> None:
    window = sa.text("array_fill('0'::bigint, ARRAY[61])")
    op.create_table(
        "quota_use",
        sa.Column(
            "quota_id",
            sa.BigInteger,
            sa.ForeignKey("quotas.id", ondelete="CASCADE"),
            primary_key=True,
            autoincrement=False,
        ),
        *(_count(name) for name in ("queued", "bytes", "open_tokens", "spent_tokens")),
        *(_count(name, sa.Numeric) for name in ("open_money", "spent_money")),
        _time("period_began_at"),
        _count("last_second"),
        *(
            sa.Column(name, ARRAY(sa.BigInteger), nullable=False, server_default=window)
            for name in ("requests", "tokens")
        ),
    )
    op.create_table(
        "quota_changes",
        sa.Column("id", sa.BigInteger, sa.Identity(always=True), primary_key=True),
        sa.Column("quota_id", sa.BigInteger, nullable=False),
        _time("made_at"),
        *(_count(name) for name in ("queued", "bytes", "open_tokens", "spent_tokens")),
        *(_count(name, sa.Numeric) for name in ("open_money", "spent_money")),
        *(_count(name) for name in ("at_second", "tokens")),
    )
    op.create_index("quota_changes_quotas", "quota_changes", ["quota_id"])
    op.create_table(
        "reservations",
        sa.Column("job_id", UUID(as_uuid=True), primary_key=True),
        sa.Column("quotas", ARRAY(sa.BigInteger), nullable=False),
        *(
            sa.Column(name, sa.BigInteger, nullable=False)
            for name in ("at_second", "tokens", "bytes")
        ),
        *(
            sa.Column(name, sa.Numeric, nullable=False)
            for name in ("money", "input_price", "output_price")
        ),
    )
    # Rows that are written with each request find room in their own page.
    op.execute("ALTER TABLE quota_use SET (fillfactor = 20, autovacuum_vacuum_scale_factor = 0)")


def _create_shares() -> None:
    op.create_table(
        "tenant_shares",
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("tenant_id", sa.Text, primary_key=True),
        sa.Column("served", sa.Double, nullable=False),
        sa.Column("in_flight", sa.Double, nullable=False),
        sa.Column("ratio", sa.Double, nullable=False),
        _time("seen_at"),
    )
    op.create_table(
        "share_changes",
        sa.Column("id", sa.BigInteger, sa.Identity(always=True), primary_key=True),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("most", sa.BigInteger, nullable=False),
    )


def _count(name: str, kind: type[sa.Numeric[Any] | sa.BigInteger] = sa.BigInteger) -> Any:
    return sa.Column(name, kind, nullable=False, server_default=sa.text("0"))


def _time(name: str) -> Any:
    return sa.Column(
        name, sa.TIMESTAMP(timezone=True), nullable=False, server_default=sa.text("now()")
    )
