"""`shardline tenant`: what tenants and their keys may take, and roles of Postgres that belong to
them. Holds no logic: the store does."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Annotated

import typer

from shardline.base.errors import Invalid
from shardline.cli import broker_users, show
from shardline.cli.arguments import Json
from shardline.cli.database import transaction
from shardline.contract.tenants.tenant_tables import LIMITS, PERIODS
from shardline.store.tenants import quotas, tenant_roles
from shardline.store.tenants.quotas import Limit, TenantQuota
from shardline.store.tenants.tenant_roles import TenantRole

tenant = typer.Typer(
    no_args_is_help=True,
    help="Tenants: their quotas, their share of tokens, and prices of models.",
)

Name = Annotated[str, typer.Argument(help="The tenant; made if there is none.")]
Key = Annotated[
    str, typer.Option(help="Only what comes with API keys of this name. Default: all of it.")
]
NONE = "none"


@tenant.command("set")
def set_limits(
    name: Name,
    limits: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="LIMIT=VALUE...",
            help=f"{', '.join(LIMITS)}, or budget_period ({', '.join(PERIODS)}); "
            f"{NONE} takes a limit away.",
        ),
    ] = None,
    *,
    key: Key = "",
    weight: Annotated[
        float | None, typer.Option(help="Its share of tokens while several tenants wait.")
    ] = None,
) -> None:
    """Set some limits; the others stay as they are."""
    wanted = dict(_limit(one) for one in limits or ())
    if not wanted and weight is None:
        raise Invalid("limits", "there are none", "Write LIMIT=VALUE, or --weight")
    with transaction() as connection:
        if wanted:
            quotas.set_quota(connection, name, wanted, key_name=key)
        if weight is not None:
            quotas.set_weight(connection, name, weight)
    typer.echo(f"{name} set")


@tenant.command("list")
def list_tenants(json: Json = False) -> None:
    """List tenants with their limits, and what is used of them now."""
    with transaction() as connection:
        found = quotas.list_quotas(connection)
    show.each(found, json=json, table=_table)


@tenant.command()
def remove(name: Annotated[str, typer.Argument(help="The tenant.")], key: Key = "") -> None:
    """Take all limits away."""
    with transaction() as connection:
        quotas.remove_quota(connection, name, key_name=key)
    typer.echo(f"{name} has no limits")


@tenant.command()
def price(
    model: Annotated[str, typer.Argument(help="As `shardline models` has it.")],
    input_price: Annotated[str, typer.Argument(metavar="INPUT", help="Of a million tokens.")],
    output_price: Annotated[str, typer.Argument(metavar="OUTPUT", help="Of a million tokens.")],
) -> None:
    """Set what tokens of a model cost, for budgets and usage."""
    with transaction() as connection:
        prices = _number("INPUT", input_price), _number("OUTPUT", output_price)
        quotas.set_price(connection, model, *prices)
    typer.echo(f"{model} set")


Role = Annotated[str, typer.Argument(help="A role of Postgres, made by CREATE ROLE.")]


@tenant.command()
def grant(name: Name, role: Role) -> None:
    """Give a role of Postgres to a tenant: its connections see and insert its rows alone."""
    with transaction() as connection:
        tenant_roles.grant_role(connection, name, role)
    typer.echo(f"{role} submits and reads as {name}")


@tenant.command()
def revoke(role: Role) -> None:
    """Take the rights of a tenant's role away."""
    with transaction() as connection:
        tenant_roles.revoke_role(connection, role)
    typer.echo(f"{role} has no rights")


@tenant.command("roles")
def list_roles(json: Json = False) -> None:
    """List roles of Postgres with their tenants."""
    with transaction() as connection:
        found = tenant_roles.list_roles(connection)
    show.each(found, json=json, table=_role_table)


tenant.command()(broker_users.grant_broker)
tenant.command()(broker_users.revoke_broker)
tenant.command("brokers")(broker_users.list_brokers)


def _role_table(rows: Iterable[TenantRole]) -> None:
    table = show.new_table("role", "tenant")
    for row in rows:
        table.add_row(row.role, row.tenant)
    show.print_table(table)


def _limit(assignment: str) -> tuple[str, Limit]:
    name, is_there, value = assignment.partition("=")
    if not is_there:
        raise Invalid("limits", f"{assignment!r} has no value", "Write LIMIT=VALUE")
    if name == "budget_period":
        return name, value
    return name, None if value == NONE else _number(name, value)


def _number(name: str, value: str) -> Decimal:
    try:
        return Decimal(value)
    except ArithmeticError as error:
        raise Invalid(name, f"{value!r} is no number", "Write digits") from error


def _table(rows: Iterable[TenantQuota]) -> None:
    table = show.new_table("tenant", "key", "weight", "limits")
    for row in rows:
        used = {
            "requests_per_min": row.requests,
            "tokens_per_min": row.tokens,
            "max_queued": row.queued,
            "budget_tokens": (row.open_tokens or 0) + (row.spent_tokens or 0),
            "budget_money": (row.open_money or 0) + (row.spent_money or 0),
        }
        limits = {name: getattr(row, name) for name in LIMITS}
        shown = (
            f"{name} {used[name]:g}/{most:g}" if name in used else f"{name} {most:g}"
            for name, most in limits.items()
            if most is not None
        )
        table.add_row(row.tenant, row.key_name, f"{row.weight:g}", ", ".join(shown))
    show.print_table(table)
