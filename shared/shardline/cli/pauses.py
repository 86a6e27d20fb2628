"""`shardline pause` and `shardline resume`: what waits. Holds no logic: the store does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

from shardline.base.errors import Invalid
from shardline.cli import show
from shardline.cli.arguments import Json
from shardline.cli.database import transaction
from shardline.contract.schedules.schedule_tables import PauseKind
from shardline.store.schedules import pauses
from shardline.store.schedules.pauses import Pause


def pause(
    kind: Annotated[PauseKind | None, typer.Argument(help="Default: list what is paused.")] = None,
    target: Annotated[
        str | None,
        typer.Argument(help="A model, a tenant, a batch's id, or KEY=VALUE of jobs' metadata."),
    ] = None,
    *,
    reason: Annotated[str | None, typer.Option(help="Shown in the list of pauses.")] = None,
    json: Json = False,
) -> None:
    """Let jobs of a model, tenant, batch or tag wait: those that run go on, deadlines too."""
    if kind is None:
        with transaction() as connection:
            found = pauses.list_pauses(connection)
        show.each(found, json=json, table=_table)
        return
    if target is None:
        raise Invalid("target", "it is missing", "Write KIND TARGET, as in `tenant acme`")
    with transaction() as connection:
        made = pauses.pause(connection, kind, target, reason=reason)
    show.as_json(made) if json else typer.echo(f"{made.kind} {made.target} paused")


def resume(
    kind: Annotated[PauseKind, typer.Argument(help="As `shardline pause` lists it.")],
    target: Annotated[str, typer.Argument(help="As `shardline pause` lists it.")],
) -> None:
    """Let paused jobs run again, the oldest first."""
    with transaction() as connection:
        pauses.resume(connection, kind, target)
    typer.echo(f"{kind} {target} resumed")


def _table(found: Iterable[Pause]) -> None:
    table = show.new_table("paused", "name", "since", "reason")
    for one in found:
        since = one.created_at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        table.add_row(one.kind, one.target, since, one.reason or "")
    show.print_table(table)
