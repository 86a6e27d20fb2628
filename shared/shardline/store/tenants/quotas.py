"""Quotas, weights and prices as rows: set, read, removed. What is reserved and settled is written
by functions and triggers of the migrations. Knows no job.

Locks: rows of `quota_use`, one for each quota, with SKIP LOCKED, to read what is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal

import msgspec
from sqlalchemy import Connection, text

from shardline.base.errors import Invalid, NotFound
from shardline.contract.tables import MAX_NAME_CHARS
from shardline.contract.tenants.tenant_tables import LIMITS, PERIODS

MAX_LISTED = 1_000
MAX_LIMIT = 2_147_483_647
MAX_WEIGHT = 1_000_000

ADD_TENANT = text("INSERT INTO tenants (id) VALUES (:tenant) ON CONFLICT DO NOTHING")
WEIGHT = text("UPDATE tenants SET weight = :weight WHERE id = :tenant")
SET = """
INSERT INTO quotas (tenant_id, key_name, {names}) VALUES (:tenant, :key_name, {values})
ON CONFLICT (tenant_id, key_name) DO UPDATE SET {changes}
"""
REMOVE = text("""
DELETE FROM quotas WHERE tenant_id = :tenant AND key_name = :key_name RETURNING id
""")
PRICE = text("""
INSERT INTO prices (model, input_price, output_price) VALUES (:model, :input, :output)
ON CONFLICT (model) DO UPDATE SET input_price = :input, output_price = :output
""")
FOLD = text("""
-- A transaction that locks a row of use folds it too, maybe for long: no other tenant waits for it.
WITH free AS (
    SELECT quota_id FROM quota_use ORDER BY quota_id FOR UPDATE SKIP LOCKED
)
-- Each is brought up to date and written back.
SELECT shardline_write_quota(shardline_fold_quota(quota_id)) FROM free
""")
LIST = text(f"""
SELECT tenants.id AS tenant, coalesce(quotas.key_name, '') AS key_name, weight,
    {", ".join(LIMITS)}, budget_period, queued, open_tokens, spent_tokens,
    open_money, spent_money,
    (SELECT sum(one) FROM unnest(requests) AS one) AS requests,
    (SELECT sum(one) FROM unnest(tokens) AS one) AS tokens
FROM tenants LEFT JOIN quotas ON quotas.tenant_id = tenants.id
LEFT JOIN quota_use ON quota_use.quota_id = quotas.id
ORDER BY 1, 2 LIMIT {MAX_LISTED}
""")  # noqa: S608 (constants of ours)

Limit = int | Decimal | str | None


class TenantQuota(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant, or one of its keys: limits, null where there is none, and what is used of them."""

    tenant: str
    key_name: str
    """Empty: all that the tenant asks for."""
    weight: float
    requests_per_min: int | None
    tokens_per_min: int | None
    max_running: int | None
    max_queued: int | None
    max_bytes: int | None
    budget_tokens: int | None
    budget_money: Decimal | None
    budget_period: str | None
    queued: int | None
    requests: int | None
    """Of the last minute, as `tokens`."""
    tokens: int | None
    open_tokens: int | None
    """Reserved by jobs that have not ended."""
    spent_tokens: int | None
    """In this period of the budget."""
    open_money: Decimal | None
    spent_money: Decimal | None


def check_name(field: str, name: str) -> None:
    """Raises Invalid for what cannot be a name of a tenant, a key or a schedule."""
    if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable():
        remedy = f"Write 1 to {MAX_NAME_CHARS} characters, all of them printable"
        raise Invalid(field, f"{name[:32]!r} cannot be one", remedy)


def add_tenant(connection: Connection, tenant: str) -> None:
    """Makes a tenant if there is none of this name. Raises Invalid."""
    check_name("tenant", tenant)
    connection.execute(ADD_TENANT, {"tenant": tenant})


def set_quota(
    connection: Connection, tenant: str, limits: Mapping[str, Limit], *, key_name: str = ""
) -> None:
    """Sets some limits of a tenant, or of one of its keys; None takes one away, the others stay. A
    tenant that there is not is made. Raises Invalid."""
    if key_name:
        check_name("key", key_name)
    for name, limit in limits.items():
        _check_limit(name, limit)
    add_tenant(connection, tenant)
    names = sorted(limits) or ["budget_period"]
    statement = SET.format(
        names=", ".join(names),
        values=", ".join(f":{name}" for name in names),
        changes=", ".join(f"{name} = excluded.{name}" for name in names),
    )
    values = {"budget_period": PERIODS[1], **limits, "tenant": tenant, "key_name": key_name}
    connection.execute(text(statement), values)


def remove_quota(connection: Connection, tenant: str, *, key_name: str = "") -> None:
    """Takes all limits away. Raises NotFound."""
    if connection.scalar(REMOVE, {"tenant": tenant, "key_name": key_name}) is None:
        raise NotFound(f"the tenant {tenant!r} has no such quota")


def set_weight(connection: Connection, tenant: str, weight: float) -> None:
    """Sets a tenant's share of tokens while several wait. Raises Invalid."""
    if not 0 < weight <= MAX_WEIGHT:
        raise Invalid("weight", f"{weight} is not over 0 and up to {MAX_WEIGHT}", "Use 1 for most")
    add_tenant(connection, tenant)
    connection.execute(WEIGHT, {"tenant": tenant, "weight": weight})


def set_price(
    connection: Connection, model: str, input_price: Decimal, output_price: Decimal
) -> None:
    """Sets what a million tokens of prompt and of completion cost. Raises Invalid."""
    for name, price in (("input", input_price), ("output", output_price)):
        if not price.is_finite() or price < 0:
            raise Invalid(name, f"{price} is no price", "Use 0 or more")
    values = {"model": model, "input": input_price, "output": output_price}
    connection.execute(PRICE, values)


def list_quotas(connection: Connection) -> list[TenantQuota]:
    """All tenants with their quotas, and what is used now; at most MAX_LISTED. While an open
    transaction has a quota, this is what was used before."""
    connection.execute(FOLD)
    return [TenantQuota(**row) for row in connection.execute(LIST).mappings()]


def fold_quotas(connection: Connection) -> None:
    """Brings what is used up to date, so that changes do not pile up without submits."""
    connection.execute(FOLD)


def _check_limit(name: str, limit: Limit) -> None:
    if name == "budget_period":
        if limit not in PERIODS:
            raise Invalid(name, f"{limit!r} is none", f"Use one of: {', '.join(PERIODS)}")
    elif name not in LIMITS:
        raise Invalid(name, "there is no such limit", f"Use some of: {', '.join(LIMITS)}")
    elif limit is not None:
        number = Decimal(limit)
        most = MAX_LIMIT if name in ("requests_per_min", "max_running", "max_queued") else 10**15
        if not number.is_finite() or not 0 <= number <= most:
            raise Invalid(name, f"{limit} is not between 0 and {most}", "Leave it out for no limit")
        if name != "budget_money" and number != int(number):
            raise Invalid(name, f"{limit} is no whole number", "Write one without a fraction")
