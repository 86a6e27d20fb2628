"""`shardline cost`: kWh, money and carbon of jobs by model, tenant and day. Holds no arithmetic but
its units'."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

import typer

from shardline.cli import show
from shardline.cli.arguments import Json
from shardline.cli.database import transaction
from shardline.store.statistics.costs import MAX_JOBS, Cost, costs


class By(StrEnum):
    """What rows are made of."""

    MODEL = "model"
    TENANT = "tenant"
    DAY = "day"


def cost(
    *,
    by: Annotated[
        list[By] | None, typer.Option(help="A row for each; may be repeated. Default: model.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3660, help="Age limit of jobs, in days.")] = 30,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Only jobs of this model.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Only jobs of this tenant.")] = None,
    json: Json = False,
) -> None:
    """Show what jobs took in kWh, and cost in money and grams of CO2 equivalent."""
    with transaction() as connection:
        found = costs(connection, num_days=days, by=by or [By.MODEL], model=model, tenant=tenant)
    show.each(found, json=json, table=_table)
    if sum(row.num_jobs for row in found) == MAX_JOBS:
        typer.echo(f"only the newest {MAX_JOBS:,} jobs are counted: ask for fewer days", err=True)
    if not json and (unknown := sum(row.num_unknown for row in found)):
        typer.echo(
            f"{unknown} attempts count as nothing: what they took is not known (yet)", err=True
        )


def _table(rows: Iterable[Cost]) -> None:
    columns = (
        "day",
        "model",
        "tenant",
        "jobs",
        "in",
        "out",
        "kWh",
        "cost",
        "gCO2e",
        "J/out",
        "cost/M",
        "from",
    )
    table = show.new_table(*columns)
    for row in rows:
        num_out = row.completion_tokens
        per_token = None if row.kwh is None or not num_out else row.kwh * 3.6e6 / num_out
        per_million = None if row.cost is None or not num_out else row.cost * 1e6 / num_out
        labels = str(row.day or "all"), row.model or "all", row.tenant or "all"
        counts = f"{row.num_jobs:,}", f"{row.prompt_tokens:,}", f"{num_out:,}"
        amounts = map(_number, (row.kwh, row.cost, row.carbon_g, per_token, per_million))
        table.add_row(*labels, *counts, *amounts, ", ".join(row.sources))
    show.print_table(table)


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.4g}"
