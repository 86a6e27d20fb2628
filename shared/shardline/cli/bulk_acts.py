"""`shardline cancel | retry | prioritize`: jobs by their ids, or all that match a filter. Holds no
logic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any
from uuid import UUID

import typer

from shardline.base.errors import Invalid
from shardline.cli import show
from shardline.cli.arguments import Json
from shardline.cli.database import acting_client
from shardline.cli.fields import parse_fields

ASKED_ABOVE = 100
"""More jobs than this are changed only after a question."""

METADATA = "metadata."

SomeJobs = Annotated[list[UUID] | None, typer.Argument(metavar="[JOB...]", help="Ids of jobs.")]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        "-w",
        metavar="FIELD=VALUE",
        help="All jobs that match: tenant, model, state, kind (text, chat, decision), batch, "
        "created_after, created_before, error_code, metadata.KEY. Repeat it for several.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Count them only.")]
Yes = Annotated[
    bool, typer.Option("--yes", "-y", help=f"Do not ask, whatever is above {ASKED_ABOVE} jobs.")
]


def cancel(
    jobs: SomeJobs = None,
    where: Where = None,
    *,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Ask for the end of jobs: a queued one ends at once, a running one a little later."""
    with acting_client() as client:
        if where or dry_run or not jobs:
            asked = _filter(jobs, where)
            _change(client.cancel_where, asked, "cancelled", dry_run=dry_run, yes=yes, json=json)
            return
        states = client.cancel(jobs)
        for job_id in jobs:
            state = states.get(job_id) or client.get(job_id).state
            show.as_json({"id": job_id, "state": state}) if json else typer.echo(
                f"{job_id} {state}"
            )


def retry(
    jobs: SomeJobs = None,
    where: Where = None,
    *,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Submit jobs that failed, or are in --where state=…, again as new jobs, each once."""
    with acting_client() as client:
        asked = _filter(jobs, where)
        _change(client.retry_where, asked, "retried", dry_run=dry_run, yes=yes, json=json)


def prioritize(
    priority: Annotated[int, typer.Argument(min=0, max=9, help="0 is served first.")],
    jobs: SomeJobs = None,
    where: Where = None,
    *,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Give queued jobs another priority."""
    with acting_client() as client:
        asked = _filter(jobs, where)
        change = partial(client.prioritize_where, priority=priority)
        _change(change, asked, "prioritized", dry_run=dry_run, yes=yes, json=json)


def _filter(jobs: Sequence[UUID] | None, where: Sequence[str] | None) -> dict[str, Any]:
    """What the client takes: it checks the fields. Raises Invalid."""
    asked = dict[str, Any]()
    metadata = dict[str, Any]()
    for assignment in where or ():
        name, _, value = assignment.partition("=")
        if name.startswith(METADATA):
            metadata |= parse_fields([assignment.removeprefix(METADATA)], "--where")
        elif name and value:
            asked[name] = value
        else:
            problem = f"{assignment!r} is no field=value"
            raise Invalid("--where", problem, "Write for example --where model=clerk")
    if metadata:
        asked["metadata"] = metadata
    if jobs:
        asked["ids"] = jobs
    return asked


def _change(
    change: Callable[..., int],
    asked: Mapping[str, Any],
    done: str,
    *,
    dry_run: bool,
    yes: bool,
    json: bool,
) -> None:
    """Asks before it changes many jobs. Raises Abort without a yes."""
    if dry_run or not yes:
        number = change(asked, dry_run=True)
        if not dry_run and number > ASKED_ABOVE:
            typer.confirm(f"{number} jobs will be {done}. Go on?", abort=True, err=True)
    if not dry_run:
        number = change(asked)
    verb = "would be " if dry_run else ""
    show.as_json({"changed": number, "dry_run": dry_run}) if json else typer.echo(
        f"{number} jobs {verb}{done}"
    )
