"""`shardline usage`: tokens and their price by tenant, key, model and day. Holds no arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

import typer

from shardline.cli import show
from shardline.cli.arguments import Json
from shardline.cli.database import transaction
from shardline.store.statistics.usage import Usage
from shardline.store.statistics.usage import usage as usage_of


class UsageBy(StrEnum):
    """What rows are made of."""

    DAY = "day"
    TENANT = "tenant"
    KEY = "key"
    MODEL = "model"


def usage(
    *,
    by: Annotated[
        list[UsageBy] | None, typer.Option(help="A row for each; may be repeated. Default: tenant.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3660, help="Age limit of jobs, in days.")] = 30,
    tenant: Annotated[str | None, typer.Option(help="Only jobs of this tenant.")] = None,
    json: Json = False,
) -> None:
    """Show what tenants have used: jobs, tokens, money."""
    with transaction() as connection:
        found = usage_of(connection, num_days=days, by=by or [UsageBy.TENANT], tenant=tenant)
    show.each(found, json=json, table=_table)


def _table(rows: Iterable[Usage]) -> None:
    columns = ("day", "tenant", "key", "model", "requests", "jobs", "in", "cached", "out", "money")
    table = show.new_table(*columns)
    for row in rows:
        labels = str(row.day or "all"), row.tenant or "all", row.key or "all", row.model or "all"
        counts = (row.num_requests, row.num_jobs, row.prompt_tokens, row.cached_tokens)
        numbers = (f"{number:,}" for number in (*counts, row.completion_tokens))
        table.add_row(*labels, *numbers, "?" if row.money is None else f"{row.money:.6g}")
    show.print_table(table)
