"""`shardline dead list | show | replay`: jobs that failed because their crashes were used up. Holds
no logic."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

import typer

from shardline.cli import show
from shardline.cli.arguments import JobId, JobIds, Json
from shardline.client import Client

dead = typer.Typer(
    no_args_is_help=True, help="Dead letters: jobs that failed because their crashes were used up."
)


@dead.command("list")
def list_dead(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Only jobs of this model.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The maximum number.")] = 20,
    after: Annotated[UUID | None, typer.Option(help="The last id of the page before.")] = None,
    json: Json = False,
) -> None:
    """List dead letters, the newest first."""
    with Client() as client:
        jobs = client.list_dead(model=model, limit=limit, after=after)
    show.each(jobs, json=json, table=show.dead_table)


@dead.command("show")
def show_dead(job: JobId, json: Json = False) -> None:
    """Show a dead letter with its attempts: which worker died under it, and when."""
    with Client() as client:
        letter = client.get_dead(job)
    show.as_json(letter) if json else show.dead_details(letter)


@dead.command()
def replay(
    jobs: JobIds,
    key: Annotated[
        str | None,
        typer.Option(help="Idempotency key, for one job: the same key replays it once only."),
    ] = None,
    json: Json = False,
) -> None:
    """Submit dead letters as new jobs, with the same prompt, parameters and seed; print the new
    ids."""
    if key is not None and len(jobs) > 1:
        raise typer.BadParameter(
            "one key belongs to one job; replay them one by one", param_hint="--key"
        )
    with Client() as client:
        for job_id in jobs:
            new_id = client.replay(job_id, idempotency_key=key)
            show.as_json({"id": new_id, "replay_of": job_id}) if json else typer.echo(str(new_id))
