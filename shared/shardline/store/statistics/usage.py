"""What tenants have used: jobs, tokens and their price, by day, tenant, key and model.
Asks the view `usage`, which counts what retention has left."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from decimal import Decimal

import msgspec
from sqlalchemy import Connection, text

from shardline.base.errors import Invalid

MAX_GROUPS = 10_000
COLUMNS = {"day": "day", "tenant": "tenant_id", "key": "key_name", "model": "model"}
SUMS = (
    *("num_jobs", "num_requests", "num_not_succeeded"),
    *("prompt_tokens", "cached_tokens", "completion_tokens"),
)


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of one day, tenant, key and model, or of all where that is None. A job's day is that on
    which it was accepted, in UTC."""

    day: date | None = None
    tenant: str | None = None
    key: str | None = None
    model: str | None = None
    num_jobs: int
    num_requests: int
    """Several choices of a request are jobs, and one request."""
    num_not_succeeded: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    money: Decimal | None
    """At present prices; None where no model has one."""


def usage(
    connection: Connection, *, num_days: int, by: Sequence[str], tenant: str | None = None
) -> list[Usage]:
    """Returns sums of the jobs of the last `days`; at most MAX_GROUPS. Raises Invalid."""
    if unknown := set(by) - COLUMNS.keys():
        raise Invalid("by", f"{min(unknown)!r} is none", f"Use some of: {', '.join(COLUMNS)}")
    names = [name for name in COLUMNS if name in by]
    groups = "".join(f"{COLUMNS[name]} AS {name}, " for name in names)
    sums = ", ".join(f"coalesce(sum({name}), 0)::bigint AS {name}" for name in SUMS)
    places = ", ".join(str(place + 1) for place in range(len(names)))
    query = f"""
        SELECT {groups}{sums}, sum(money) AS money FROM usage
        WHERE day > (now() AT TIME ZONE 'UTC')::date - CAST(:num_days AS int)
            AND (CAST(:tenant AS text) IS NULL OR tenant_id = :tenant)
        {f"GROUP BY {places} ORDER BY {places}" if places else ""} LIMIT {MAX_GROUPS}
    """  # noqa: S608 (constants of ours)
    rows = connection.execute(text(query), {"num_days": num_days, "tenant": tenant})
    return [Usage(**row) for row in rows.mappings()]
