"""Pauses, which jobs wait for without being looked at, and schedules, whose jobs relays insert.

Each step may come again after a migration that was killed.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSON, JSONB, UUID

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None

TO_SEND = (
    "CREATE INDEX CONCURRENTLY jobs_to_send_new"
    " ON jobs (model, priority, tenant_id, created_at, id, not_before)"
    " WHERE state = 'queued' AND sent_at IS NULL AND prepared_at IS NOT NULL{rule}"
)
PAUSED = (
    "CREATE INDEX CONCURRENTLY jobs_paused ON jobs (paused_by)"
    " WHERE state = 'queued' AND paused_by IS NOT NULL"
)

# Relays look as soon as something is paused or resumed.
PAUSES_TRIGGER = """
CREATE TRIGGER shardline_changed_pauses AFTER INSERT OR DELETE ON pauses
    FOR EACH STATEMENT EXECUTE FUNCTION shardline_new_jobs()
"""

# Whoever changes when a schedule fires begins it anew from now: nothing before that is missed.
CHANGED_SCHEDULE = """
CREATE OR REPLACE FUNCTION shardline_changed_schedule() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.fires_after = now();
    NEW.next_at = NULL;
    RETURN NEW;
END
$$;
CREATE TRIGGER shardline_changed_schedule BEFORE UPDATE OF cron, time_zone, paused ON schedules
    FOR EACH ROW WHEN ((OLD.cron, OLD.time_zone, OLD.paused)
        IS DISTINCT FROM (NEW.cron, NEW.time_zone, NEW.paused))
    EXECUTE FUNCTION shardline_changed_schedule()
"""


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.execute("ALTER TABLE jobs ADD COLUMN IF NOT EXISTS paused_by text")
    _drop_tables()
    _create_pauses()
    _create_schedules()
    op.execute(PAUSES_TRIGGER)
    op.execute(CHANGED_SCHEDULE)
    with op.get_context().autocommit_block():
        _replace_to_send(" AND paused_by IS NULL")
        op.execute("SET lock_timeout = 0")
        op.execute("DROP INDEX CONCURRENTLY IF EXISTS jobs_paused")
        op.execute(PAUSED)
        op.execute("RESET lock_timeout")


def downgrade() -> None:
    """Bring the schema back: what was paused runs."""
    with op.get_context().autocommit_block():
        _replace_to_send("")
    _drop_tables()
    op.execute("ALTER TABLE jobs DROP COLUMN IF EXISTS paused_by")


def _replace_to_send(rule: str) -> None:
    """Relays of the release before sort what they send meanwhile. Nobody waits for one who makes an
    index concurrently: so it may wait as long as it takes."""
    op.execute("SET lock_timeout = 0")
    op.execute("DROP INDEX CONCURRENTLY IF EXISTS jobs_to_send_new")
    op.execute(TO_SEND.format(rule=rule))
    op.execute("DROP INDEX CONCURRENTLY IF EXISTS jobs_to_send")
    op.execute("ALTER INDEX jobs_to_send_new RENAME TO jobs_to_send")
    op.execute("RESET lock_timeout")


def _drop_tables() -> None:
    for table in ("pauses", "schedules"):
        op.execute(f"DROP TABLE IF EXISTS {table}")
    op.execute("DROP FUNCTION IF EXISTS shardline_changed_schedule()")


def _create_pauses() -> None:
    op.create_table(
        "pauses",
        sa.Column("kind", sa.Text, primary_key=True),
        sa.Column("target", sa.Text, primary_key=True),
        sa.Column("reason", sa.Text),
        _time("created_at", nullable=False, server_default=sa.text("now()")),
        _check("pauses_kind_is_known", "kind IN ('model', 'tenant', 'batch', 'tag')"),
        _check("pauses_target_is_1_to_512_characters", "length(target) BETWEEN 1 AND 512"),
        _check("pauses_reason_is_at_most_1024_characters", "length(reason) <= 1024"),
        _check("pauses_a_tag_is_key_and_value", "kind <> 'tag' OR strpos(target, '=') > 1"),
    )


def _create_schedules() -> None:
    op.create_table(
        "schedules",
        sa.Column(
            "id",
            UUID(as_uuid=True),
            primary_key=True,
            server_default=sa.text("gen_random_uuid()"),
        ),
        sa.Column(
            "tenant_id",
            sa.Text,
            sa.ForeignKey("tenants.id"),
            nullable=False,
            server_default=sa.text("'default'"),
        ),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("cron", sa.Text, nullable=False),
        sa.Column("time_zone", sa.Text, nullable=False, server_default=sa.text("'UTC'")),
        sa.Column("request", JSON, nullable=False),
        sa.Column("catch_up", sa.Text, nullable=False, server_default=sa.text("'once'")),
        sa.Column("paused", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("key_name", sa.Text),
        _time("created_at", nullable=False, server_default=sa.text("now()")),
        _time("fires_after", nullable=False, server_default=sa.text("now()")),
        _time("next_at"),
        _time("last_at"),
        sa.Column("last_job_id", UUID(as_uuid=True)),
        sa.Column("last_error", JSONB),
        sa.UniqueConstraint("tenant_id", "name"),
        _check("schedules_name_is_1_to_64_characters", "length(name) BETWEEN 1 AND 64"),
        _check("schedules_cron_is_1_to_256_characters", "length(cron) BETWEEN 1 AND 256"),
        _check("schedules_time_zone_is_1_to_64_characters", "length(time_zone) BETWEEN 1 AND 64"),
        _check("schedules_catch_up_is_known", "catch_up IN ('once', 'none')"),
        _check("schedules_request_is_an_object", "json_typeof(request) = 'object'"),
        _check(
            "schedules_times_can_be_read",
            "extract(year FROM fires_after) BETWEEN 2000 AND 2999"
            " AND extract(year FROM next_at) BETWEEN 2000 AND 2999",
        ),
        _check("schedules_key_name_is_1_to_64_characters", "length(key_name) BETWEEN 1 AND 64"),
    )
    op.create_index(
        "schedules_due", "schedules", ["next_at"], postgresql_where=sa.text("NOT paused")
    )


def _time(name: str, **options: Any) -> sa.Column[Any]:
    return sa.Column(name, sa.TIMESTAMP(timezone=True), **options)


def _check(name: str, rule: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(rule, name=op.f(name))
