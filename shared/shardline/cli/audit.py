"""`shardline audit`: who did what. Holds no logic: the store does."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated

import typer

from shardline.cli import show
from shardline.cli.arguments import Json
from shardline.cli.database import transaction
from shardline.store.audit import MAX_LISTED, AuditEntry, AuditQuery, list_acts
from shardline.store.connection.encoding import dump


def audit(
    *,
    since: Annotated[datetime | None, typer.Option(help="Acts of then or later.")] = None,
    actor: Annotated[
        str | None, typer.Option(help="As shown: 'key ID', 'cli USER' or 'role NAME'.")
    ] = None,
    act: Annotated[str | None, typer.Option(help="As shown: create, revoke, cancel.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=MAX_LISTED, help="The maximum number.")] = 100,
    json: Json = False,
) -> None:
    """List administrative acts, the newest first: on keys, tenants, pauses, schedules, webhooks,
    models, and on many jobs at once."""
    began = None if since is None else since.astimezone()
    asked = AuditQuery(since=began, actor=actor, act=act)
    with transaction() as connection:
        found, _ = list_acts(connection, asked, limit=limit)
    show.each(found, json=json, table=_table)


def _table(rows: Iterable[AuditEntry]) -> None:
    table = show.new_table("at", "actor", "tenant", "act", "object", "change")
    for row in rows:
        at = row.at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        thing = f"{row.object_kind} {row.object_id}".strip()
        table.add_row(at, row.actor, row.tenant or "", row.act, thing, dump(row.change))
    show.print_table(table)
