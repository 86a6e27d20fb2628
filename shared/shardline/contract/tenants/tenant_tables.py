"""The tables of tenants: their weights, quotas, what is used of these, and their shares of a model.
Knows no job.

A door reserves in the transaction that accepts a job, under the lock of a row of `quota_use`. What
moves on later (a claim, an end) adds a row to `quota_changes` without a wait; the next to
accept folds them in. The functions and triggers are in the migrations.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    Numeric,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, UUID

from shardline.contract.table_parts import checks, created, metadata, one_of, time_of

WINDOW_S = 61
"""Seconds of the window that limits by the minute look at: whole ones, so that no 60 seconds hold
more than a limit."""

PERIODS = ("day", "month", "ever")
"""Of a budget, in UTC."""

LIMITS = (
    *("requests_per_min", "tokens_per_min", "max_running", "max_queued", "max_bytes"),
    *("budget_tokens", "budget_money"),
)
"""Columns of `quotas`; null is no limit."""

tenants = Table(
    "tenants",
    metadata,
    Column("id", Text, primary_key=True),
    created("created_at"),
    # Of tokens, while several tenants wait for one model.
    Column("weight", Double, nullable=False, server_default=text("1")),
    *checks(weight_is_positive="weight > 0 AND weight <= 1000000"),
)

# Postgres' roles that see and insert one tenant's rows alone.
tenant_roles = Table(
    "tenant_roles",
    metadata,
    Column("role_name", Text, primary_key=True),
    Column("tenant_id", Text, ForeignKey("tenants.id"), nullable=False),
    created("created_at"),
)

# Redis' users that write into one tenant's stream and queue alone; relays read those of tenants
# that are here.
tenant_doors = Table(
    "tenant_doors",
    metadata,
    Column("user_name", Text, primary_key=True),
    Column("tenant_id", Text, ForeignKey("tenants.id"), nullable=False),
    created("created_at"),
)

quotas = Table(
    "quotas",
    metadata,
    Column("tenant_id", Text, ForeignKey("tenants.id"), primary_key=True),
    # The name of an API key; empty: all that the tenant asks for, by any door.
    Column("key_name", Text, primary_key=True, server_default=text("''")),
    # Another one each time that a quota is made, so that what was reserved before does not count.
    Column("id", BigInteger, Identity(always=True), nullable=False),
    Column("requests_per_min", Integer),
    Column("tokens_per_min", BigInteger),
    Column("max_running", Integer),
    Column("max_queued", Integer),
    # Of the tenant's files, and of the requests that have not ended.
    Column("max_bytes", BigInteger),
    Column("budget_tokens", BigInteger),
    Column("budget_money", Numeric),
    Column("budget_period", Text, nullable=False, server_default=text("'month'")),
    UniqueConstraint("id"),
    *checks(
        limits_are_not_negative=" AND ".join(f"coalesce({name}, 0) >= 0" for name in LIMITS),
        budget_period_is_known=one_of("budget_period", PERIODS),
    ),
)

quota_use = Table(
    "quota_use",
    metadata,
    Column("quota_id", BigInteger, ForeignKey("quotas.id", ondelete="CASCADE"), primary_key=True),
    Column("queued", BigInteger, nullable=False, server_default=text("0")),
    Column("bytes", BigInteger, nullable=False, server_default=text("0")),
    # Reserved by jobs that have not ended, and spent by those that have, in this period.
    *(
        Column(name, kind, nullable=False, server_default=text("0"))
        for name, kind in (
            *(("open_tokens", BigInteger), ("open_money", Numeric)),
            *(("spent_tokens", BigInteger), ("spent_money", Numeric)),
        )
    ),
    time_of("period_began_at", nullable=False, server_default=text("now()")),
    # What came in each of the last seconds: that of second `s` is in place `s % 61 + 1`.
    Column("last_second", BigInteger, nullable=False, server_default=text("0")),
    *(
        Column(
            name,
            ARRAY(BigInteger),
            nullable=False,
            server_default=text(f"array_fill('0'::bigint, ARRAY[{WINDOW_S}])"),
        )
        for name in ("requests", "tokens")
    ),
)

quota_changes = Table(
    "quota_changes",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("quota_id", BigInteger, nullable=False),
    created("made_at"),
    *(
        Column(name, kind, nullable=False, server_default=text("0"))
        for name, kind in (
            *(("queued", BigInteger), ("bytes", BigInteger)),
            *(("open_tokens", BigInteger), ("open_money", Numeric)),
            *(("spent_tokens", BigInteger), ("spent_money", Numeric)),
            *(("at_second", BigInteger), ("tokens", BigInteger)),
        )
    ),
)
Index("quota_changes_quotas", quota_changes.c.quota_id)

# What jobs that have not ended have reserved; only those of tenants with quotas have a row.
reservations = Table(
    "reservations",
    metadata,
    Column("job_id", UUID(as_uuid=True), primary_key=True),
    Column("quotas", ARRAY(BigInteger), nullable=False),
    Column("at_second", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("money", Numeric, nullable=False),
    # For a million tokens, as they were when the job was accepted.
    Column("input_price", Numeric, nullable=False),
    Column("output_price", Numeric, nullable=False),
)

# What a million tokens of a model cost; a model without a row costs nothing.
prices = Table(
    "prices",
    metadata,
    Column("model", Text, primary_key=True),
    Column("input_price", Numeric, nullable=False),
    Column("output_price", Numeric, nullable=False),
    *checks(prices_are_not_negative="input_price >= 0 AND output_price >= 0"),
)

# Tokens that ended jobs have had while several tenants waited for a model. Relays write it.
tenant_shares = Table(
    "tenant_shares",
    metadata,
    Column("model", Text, primary_key=True),
    Column("tenant_id", Text, primary_key=True),
    Column("served", Double, nullable=False),
    # What its jobs on the way will take, as far as `ratio` tells: the part of the most that its
    # jobs could take that they took of late.
    Column("in_flight", Double, nullable=False),
    Column("ratio", Double, nullable=False),
    created("seen_at"),
)

share_changes = Table(
    "share_changes",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("model", Text, nullable=False),
    Column("tenant_id", Text, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("most", BigInteger, nullable=False),
)
