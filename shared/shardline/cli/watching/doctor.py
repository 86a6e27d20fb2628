"""`shardline doctor`: is everything there, and what to do if not. Checks nothing itself."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import typer
from rich.text import Text

from shardline.base.config import Settings
from shardline.cli import show
from shardline.cli.arguments import Json
from shardline.cli.local_stack import local_gateway
from shardline.cli.watching.checkup import CheckResult, Verdict, check_all

COLORS = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.BROKEN: "red"}


def doctor(json: Json = False) -> None:
    """Check Postgres, Redis, relays, models, the gateway and the disk. Exit status 1: something is
    broken."""
    results = list(check_all(Settings(), local_gateway(Path.cwd())))
    show.each(results, json=json, table=_table)
    if any(each.verdict is Verdict.BROKEN for each in results):
        raise typer.Exit(1)


def _table(results: Iterable[CheckResult]) -> None:
    table = show.new_table("", "check", "found", "what to do")
    for each in results:
        verdict = Text(each.verdict, style=COLORS[each.verdict])
        table.add_row(verdict, each.name, each.found, each.remedy)
    show.print_table(table)
