"""Webhooks: endpoints, what each of them is to hear, and triggers that write it with each end."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY, UUID

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

TELL = """
CREATE FUNCTION shardline_tell_webhooks(of_tenant text, of_type text, of_object uuid)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO webhook_deliveries (endpoint_id, event_type, object_id)
    SELECT id, of_type, of_object FROM webhook_endpoints
    WHERE tenant_id = of_tenant AND disabled_at IS NULL AND of_type = ANY(event_types);
    IF FOUND THEN
        PERFORM pg_notify('shardline_tasks', 'webhooks');
    END IF;
END
$$;
"""

# A line of a batch is none: its batch is told of.
EVENT_OF_JOB = """
CREATE FUNCTION shardline_event_of_job(of_id uuid, of_choice uuid, of_state text)
RETURNS text LANGUAGE sql STABLE AS $$
SELECT CASE
    WHEN EXISTS (SELECT FROM batch_lines WHERE job_id = coalesce(of_choice, of_id)) THEN NULL
    WHEN NOT EXISTS (
        SELECT FROM responses WHERE job_id = of_id AND options ->> 'background' = 'true')
        THEN 'job.' || of_state
    WHEN of_state = 'cancelled' THEN 'response.cancelled'
    WHEN of_state <> 'succeeded' THEN 'response.failed'
    WHEN EXISTS (SELECT FROM results WHERE job_id = of_id AND finish_reason = 'length')
        THEN 'response.incomplete'
    ELSE 'response.completed' END
$$;
"""

CELERYS_PART = """
    UPDATE celery_tasks SET due_at = now() WHERE job_id = NEW.id AND settled_at IS NULL;
    IF FOUND THEN
        PERFORM pg_notify('shardline_tasks', '');
    END IF;
"""

# Every writer of an end passes here. A tenant without an endpoint costs a look at an empty table.
WEBHOOKS_PART = """
    IF EXISTS (SELECT FROM webhook_endpoints WHERE tenant_id = NEW.tenant_id) THEN
        PERFORM shardline_tell_webhooks(
            NEW.tenant_id, shardline_event_of_job(NEW.id, NEW.choice_of, NEW.state), NEW.id);
    END IF;
"""

ENDED_BATCH = """
CREATE FUNCTION shardline_ended_batch() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM shardline_tell_webhooks(NEW.tenant_id, 'batch.' || NEW.status, NEW.id);
    RETURN NULL;
END
$$;
CREATE TRIGGER shardline_ended_batch AFTER UPDATE OF status ON batches FOR EACH ROW
    WHEN (OLD.status <> NEW.status
        AND NEW.status IN ('completed', 'failed', 'expired', 'cancelled'))
    EXECUTE FUNCTION shardline_ended_batch();
"""


def upgrade() -> None:
    """Bring the schema to this revision."""
    _create_endpoints()
    _create_deliveries()
    op.execute(TELL)
    op.execute(EVENT_OF_JOB)
    op.execute(ENDED_BATCH)
    _replace_ended_job(CELERYS_PART + WEBHOOKS_PART)


def downgrade() -> None:
    """Bring the schema back to the revision before."""
    _replace_ended_job(CELERYS_PART)
    op.execute("DROP TRIGGER shardline_ended_batch ON batches")
    op.execute("DROP FUNCTION shardline_ended_batch()")
    op.execute("DROP FUNCTION shardline_event_of_job(uuid, uuid, text)")
    op.execute("DROP FUNCTION shardline_tell_webhooks(text, text, uuid)")
    for table in ("webhook_deliveries", "webhook_endpoints"):
        op.drop_table(table)


def _replace_ended_job(body: str) -> None:
    """Locks no table: ends that run go on with the function that they began with."""
    op.execute(
        "CREATE OR REPLACE FUNCTION shardline_ended_job() RETURNS trigger LANGUAGE plpgsql AS $$"
        f"\nBEGIN{body}    RETURN NULL;\nEND\n$$;"
    )


def _create_endpoints() -> None:
    op.create_table(
        "webhook_endpoints",
        _id("id", primary_key=True),
        sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("event_types", ARRAY(sa.Text), nullable=False),
        sa.Column("secret", sa.Text, nullable=False),
        sa.Column("old_secret", sa.Text),
        _time("old_secret_until"),
        _time("created_at", nullable=False, server_default=sa.text("now()")),
        _time("updated_at", nullable=False, server_default=sa.text("now()")),
        _time("failing_since"),
        _time("disabled_at"),
        sa.Column("disabled_reason", sa.Text),
        _check("webhook_endpoints_name_is_1_to_256_characters", "length(name) BETWEEN 1 AND 256"),
        _check("webhook_endpoints_url_is_1_to_2048_characters", "length(url) BETWEEN 1 AND 2048"),
        _check(
            "webhook_endpoints_a_rotation_has_an_end",
            "(old_secret IS NULL) = (old_secret_until IS NULL)",
        ),
        _check(
            "webhook_endpoints_a_disabled_one_has_a_reason",
            "(disabled_at IS NULL) = (disabled_reason IS NULL)",
        ),
    )
    listing = ["tenant_id", "created_at", "id"]
    op.create_index("webhook_endpoints_listing", "webhook_endpoints", listing)


def _create_deliveries() -> None:
    op.create_table(
        "webhook_deliveries",
        _id("id", primary_key=True, server_default=sa.text("gen_random_uuid()")),
        _id("endpoint_id", nullable=False),
        sa.Column("event_type", sa.Text, nullable=False),
        _id("object_id", nullable=False),
        _time("created_at", nullable=False, server_default=sa.text("now()")),
        sa.Column("is_test", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("state", sa.Text, nullable=False, server_default=sa.text("'pending'")),
        _time("due_at", server_default=sa.text("now()")),
        sa.Column("num_attempts", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("status_code", sa.Integer),
        sa.Column("error", sa.Text),
        _time("ended_at"),
        _check("webhook_deliveries_state_is_known", "state IN ('pending', 'delivered', 'dead')"),
        _check(
            "webhook_deliveries_a_pending_one_is_due",
            "(state = 'pending') = (due_at IS NOT NULL)",
        ),
        _check(
            "webhook_deliveries_an_ended_one_has_a_time",
            "(state = 'pending') = (ended_at IS NULL)",
        ),
    )
    for name, columns, where in (
        ("due", ["endpoint_id", "due_at"], "due_at IS NOT NULL"),
        ("ended", ["ended_at"], "ended_at IS NOT NULL"),
        ("listing", ["endpoint_id", "created_at", "id"], None),
    ):
        op.create_index(
            f"webhook_deliveries_{name}",
            "webhook_deliveries",
            columns,
            postgresql_where=where and sa.text(where),
        )


def _id(name: str, **options: Any) -> sa.Column[Any]:
    return sa.Column(name, UUID(as_uuid=True), **options)


def _time(name: str, **options: Any) -> sa.Column[Any]:
    return sa.Column(name, sa.TIMESTAMP(timezone=True), **options)


def _check(name: str, rule: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(rule, name=op.f(name))
