"""The tables of webhooks; `tables` has the others. Knows no query.

Deliveries are inserted by functions in the migrations, which triggers call as jobs and batches end.
"""

from __future__ import annotations

from sqlalchemy import Boolean, Column, ForeignKey, Index, Integer, Table, Text, false, text
from sqlalchemy.dialects.postgresql import ARRAY, UUID

from shardline.contract.table_parts import checks, created, metadata, one_of, partial_index, time_of
from shardline.contract.webhooks.targets import MAX_URL_CHARS

MAX_NAME_CHARS = 256
DELIVERY_STATES = ("pending", "delivered", "dead")

webhook_endpoints = Table(
    "webhook_endpoints",
    metadata,
    Column("id", UUID(as_uuid=True), primary_key=True),
    Column("tenant_id", Text, ForeignKey("tenants.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("url", Text, nullable=False),
    Column("event_types", ARRAY(Text), nullable=False),
    # Plain, because relays sign with it: only who may read this table can forge a webhook.
    Column("secret", Text, nullable=False),
    # The one before, which signs too until then.
    Column("old_secret", Text),
    time_of("old_secret_until"),
    created("created_at"),
    created("updated_at"),
    # By relays: since when no delivery succeeded, though some were tried. None: the last one did.
    time_of("failing_since"),
    # It hears of nothing, until its owner enables it.
    time_of("disabled_at"),
    Column("disabled_reason", Text),
    *checks(
        name_is_1_to_256_characters=f"length(name) BETWEEN 1 AND {MAX_NAME_CHARS}",
        url_is_1_to_2048_characters=f"length(url) BETWEEN 1 AND {MAX_URL_CHARS}",
        a_rotation_has_an_end="(old_secret IS NULL) = (old_secret_until IS NULL)",
        a_disabled_one_has_a_reason="(disabled_at IS NULL) = (disabled_reason IS NULL)",
    ),
)
Index(
    "webhook_endpoints_listing",
    webhook_endpoints.c.tenant_id,
    webhook_endpoints.c.created_at,
    webhook_endpoints.c.id,
)

# What each endpoint is to hear. Without a foreign key: each end of a job would lock the row of its
# endpoint for it. Deliveries of a deleted endpoint are given up by relays.
webhook_deliveries = Table(
    "webhook_deliveries",
    metadata,
    Column("id", UUID(as_uuid=True), primary_key=True, server_default=text("gen_random_uuid()")),
    Column("endpoint_id", UUID(as_uuid=True), nullable=False),
    Column("event_type", Text, nullable=False),
    # A job, or a batch.
    Column("object_id", UUID(as_uuid=True), nullable=False),
    created("created_at"),
    Column("is_test", Boolean, nullable=False, server_default=false()),
    Column("state", Text, nullable=False, server_default=text("'pending'")),
    # When relays send it, put off while one does; None once it has ended.
    time_of("due_at", server_default=text("now()")),
    # Also the fence of an attempt.
    Column("num_attempts", Integer, nullable=False, server_default=text("0")),
    # Of the last attempt: its answer, or why there was none.
    Column("status_code", Integer),
    Column("error", Text),
    time_of("ended_at"),
    *checks(
        state_is_known=one_of("state", DELIVERY_STATES),
        a_pending_one_is_due="(state = 'pending') = (due_at IS NOT NULL)",
        an_ended_one_has_a_time="(state = 'pending') = (ended_at IS NULL)",
    ),
)
partial_index(
    "webhook_deliveries_due",
    webhook_deliveries.c.endpoint_id,
    webhook_deliveries.c.due_at,
    where="due_at IS NOT NULL",
)
partial_index(
    "webhook_deliveries_ended", webhook_deliveries.c.ended_at, where="ended_at IS NOT NULL"
)
Index(
    "webhook_deliveries_listing",
    webhook_deliveries.c.endpoint_id,
    webhook_deliveries.c.created_at,
    webhook_deliveries.c.id,
)
