"""`shardline schedule add | list | remove | pause | resume`: jobs at times of cron. Holds no logic:
the store does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from typing import Annotated, TypeVar

import typer
from rich.text import Text
from sqlalchemy import Connection

from shardline.cli import show
from shardline.cli.arguments import Json
from shardline.cli.database import transaction
from shardline.cli.fields import parse_fields, prompt_fields
from shardline.contract.job import DEFAULT_TENANT
from shardline.contract.schedules.schedule_tables import CatchUp
from shardline.store.schedules import schedule_rows
from shardline.store.schedules.schedule_rows import MAX_SCHEDULES, NewSchedule, Schedule

schedule = typer.Typer(
    no_args_is_help=True, help="Schedules: jobs that relays submit at times of cron expressions."
)

Answer = TypeVar("Answer")
Name = Annotated[str, typer.Argument(help="What the schedule is called.")]
Tenant = Annotated[str, typer.Option(help="The tenant of its jobs.")]


@schedule.command()
def add(
    name: Name,
    cron: Annotated[str, typer.Argument(help="Minute, hour, day, month, day of week.")],
    prompt: Annotated[str | None, typer.Argument(help="The jobs' prompt.")] = None,
    *,
    model: Annotated[str, typer.Option("--model", "-m", help="The jobs' model.")],
    chat: Annotated[
        bool, typer.Option("--chat/--text", help="The prompt is a user's message, or a text.")
    ] = False,
    field: Annotated[
        list[str] | None,
        typer.Option("--field", "-f", help="Any other field of a job: -f max_tokens=64."),
    ] = None,
    time_zone: Annotated[str, typer.Option(help="Of the expression.")] = "UTC",
    catch_up: Annotated[
        CatchUp, typer.Option(help="What times become that no relay was there for: one job, none.")
    ] = CatchUp.ONCE,
    tenant: Tenant = DEFAULT_TENANT,
    json: Json = False,
) -> None:
    """Make a schedule: from now on each of its times is a job."""
    of_prompt = {} if prompt is None else prompt_fields(prompt, chat=chat, system=None)
    new = NewSchedule(
        name=name,
        cron=cron,
        time_zone=time_zone,
        request={"model": model, **of_prompt, **parse_fields(field or ())},
        catch_up=catch_up,
        tenant=tenant,
    )
    show.each([_ask(partial(schedule_rows.create, new=new))], json=json, table=_table)


@schedule.command("list")
def list_schedules(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    json: Json = False,
) -> None:
    """List schedules, newest first: when each fires next, and what became of its last time."""
    page = partial(schedule_rows.list_schedules, tenant=tenant, limit=MAX_SCHEDULES)
    found, _ = _ask(page)
    show.each(found, json=json, table=_table)


@schedule.command()
def remove(name: Name, tenant: Tenant = DEFAULT_TENANT) -> None:
    """Delete a schedule; its jobs go on."""

    def work(connection: Connection) -> None:
        schedule_id = schedule_rows.id_of(connection, tenant, name)
        schedule_rows.delete(connection, schedule_id, tenant=tenant)

    _ask(work)
    typer.echo(f"{name} removed")


@schedule.command()
def pause(name: Name, tenant: Tenant = DEFAULT_TENANT) -> None:
    """Let a schedule fire no more; its jobs go on."""
    _set_paused(name, tenant, paused=True)
    typer.echo(f"{name} paused")


@schedule.command()
def resume(name: Name, tenant: Tenant = DEFAULT_TENANT) -> None:
    """Let a schedule fire again from now on."""
    _set_paused(name, tenant, paused=False)
    typer.echo(f"{name} resumed")


def _set_paused(name: str, tenant: str, *, paused: bool) -> None:
    def work(connection: Connection) -> None:
        schedule_id = schedule_rows.id_of(connection, tenant, name)
        schedule_rows.set_paused(connection, schedule_id, paused=paused, tenant=tenant)

    _ask(work)


def _ask(work: Callable[[Connection], Answer]) -> Answer:
    with transaction() as connection:
        return work(connection)


def _table(found: Iterable[Schedule]) -> None:
    table = show.new_table("schedule", "tenant", "cron", "zone", "next", "last", "last job")
    for one in found:
        next_at = Text("paused", style="yellow") if one.paused else Text(_time(one.next_at))
        last = Text("" if one.last_job_id is None else str(one.last_job_id))
        if one.last_error is not None:
            last = Text(str(one.last_error.get("problem")), style="red")
        times = (next_at, _time(one.last_at), last)
        table.add_row(one.name, one.tenant, one.cron, one.time_zone, *times)
    show.print_table(table)


def _time(moment: datetime | None) -> str:
    return "" if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")
