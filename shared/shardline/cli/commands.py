"""The commands. Each reads its arguments, asks the client, and shows the answer; none holds own
logic."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import typer

from shardline.base import log
from shardline.base.errors import Invalid
from shardline.base.streams import escape_unencodable
from shardline.cli import show
from shardline.cli.arguments import (
    After,
    AttemptsOption,
    BackoffOption,
    ChatOption,
    FieldsOption,
    JobId,
    JobIds,
    Json,
    MaxBackoffOption,
    RetryOption,
    SchemaFile,
    ToolFiles,
)
from shardline.cli.audit import audit
from shardline.cli.batches.run_batch import run_batch
from shardline.cli.bulk_acts import cancel, prioritize, retry
from shardline.cli.cost import cost
from shardline.cli.database import transaction
from shardline.cli.dead import dead
from shardline.cli.exits import HELP, Reporting
from shardline.cli.fields import (
    callable_tools,
    held_to,
    parents,
    parse_fields,
    prompt_fields,
    read_prompt,
)
from shardline.cli.keys import keys
from shardline.cli.local_stack import use_local_stack
from shardline.cli.pauses import pause, resume
from shardline.cli.schedules import schedule
from shardline.cli.tenants import tenant
from shardline.cli.trace import trace
from shardline.cli.usage import usage
from shardline.cli.watching.doctor import doctor
from shardline.cli.watching.top import top
from shardline.cli.webhooks import webhooks
from shardline.client import Client
from shardline.client.requests import request_of, succeeded
from shardline.contract.job import DEFAULT_TENANT, JobState
from shardline.contract.request_parsing import OF_CHATS
from shardline.store.models import ModelChoice, get_models, model_choices
from shardline.store.pipelines import live_pipelines

JOBS = "Jobs"
INSTALLATION = "The installation"
DEVICES = "Devices and plans"

MORE_COMMANDS = "shardline.commands"
"""Entry points: commands of packages next to this one."""

cli = typer.Typer(
    cls=Reporting,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Prompts in, completions out, over Postgres (SHARDLINE_DATABASE_URL) and Redis "
    "(SHARDLINE_REDIS_URL); without either, of the stack that `make up` runs in this folder.",
    epilog=HELP,
)


def main() -> None:
    """The `shardline` command."""
    escape_unencodable()
    log.configure(service="cli", level="WARNING")
    try:
        if "--help" not in sys.argv:
            use_local_stack(Path.cwd())
    except Invalid as error:
        typer.echo(show.printable(str(error)), err=True)
        raise SystemExit(2) from error
    cli()


@cli.command(rich_help_panel=JOBS)
def submit(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; from standard input if absent or -.")
    ] = None,
    *,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Default: the only registered one.")
    ] = None,
    chat: ChatOption = None,
    system: Annotated[
        str | None, typer.Option(help="A system message before it; implies --chat.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest completion.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")] = None,
    priority: Annotated[int | None, typer.Option(help="0 is served first, 9 last.")] = None,
    tool: ToolFiles = None,
    schema: SchemaFile = None,
    after: After = None,
    max_attempts: AttemptsOption = None,
    backoff_s: BackoffOption = None,
    max_backoff_s: MaxBackoffOption = None,
    retry_on: RetryOption = None,
    field: FieldsOption = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Print the completion when it is done.")
    ] = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print the completion as it grows.")
    ] = False,
    json: Json = False,
) -> None:
    """Store one job and print its id, or wait for its completion."""
    given = _given(max_tokens=max_tokens, temperature=temperature, seed=seed, priority=priority)
    text = read_prompt(prompt)
    files = {**held_to(schema), **callable_tools(tool or ())}
    waits = _given(backoff_s=backoff_s, max_backoff_s=max_backoff_s)
    policy = {**_given(max_attempts=max_attempts, on=retry_on or None), **waits}
    others = {**parents(after or ()), **_given(retry=policy or None)}
    fields = {**given, **files, **others, **parse_fields(field or ())}
    _check(text, fields)
    chosen = _choose_model(model)
    is_chat = chosen.has_chat_template if chat is None and system is None else chat
    message = prompt_fields(text, chat=bool(is_chat), system=system)
    with Client() as client:
        job_id = client.submit(chosen.name, **{**message, **fields})
        if stream or wait:
            typer.echo(f"job {job_id}", err=True)
            _stream(client, job_id, json=json) if stream else _wait(
                client, [job_id], None, json=json
            )
        elif json:
            show.as_json({"id": job_id})
        else:
            typer.echo(str(job_id))


@cli.command(rich_help_panel=JOBS)
def wait(
    jobs: JobIds,
    timeout_s: Annotated[
        float | None, typer.Option(help="Seconds until it gives up; the jobs go on.")
    ] = None,
    json: Json = False,
) -> None:
    """Wait until jobs have ended and print their completions."""
    with Client() as client:
        _wait(client, jobs, timeout_s, json=json)


@cli.command(rich_help_panel=JOBS)
def stream(job: JobId, json: Json = False) -> None:
    """Print a job's completion from its beginning as it grows."""
    with Client() as client:
        _stream(client, job, json=json)


@cli.command(rich_help_panel=JOBS)
def get(jobs: JobIds, json: Json = False) -> None:
    """Show jobs with their results."""
    with Client() as client:
        for job in map(client.get, jobs):
            show.as_json(job) if json else show.job_details(job)


@cli.command("list", rich_help_panel=JOBS)
def list_jobs(
    state: Annotated[JobState | None, typer.Option(help="Only jobs in this state.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Only jobs of this model.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The maximum number.")] = 20,
    after: Annotated[UUID | None, typer.Option(help="The last id of the page before.")] = None,
    json: Json = False,
) -> None:
    """List jobs, newest first."""
    with Client() as client:
        jobs = client.list(state=state, model=model, limit=limit, after=after)
    show.each(jobs, json=json, table=show.jobs_table)


for on_many in (cancel, retry, prioritize):
    cli.command(rich_help_panel=JOBS)(on_many)


@cli.command(rich_help_panel=INSTALLATION)
def pipelines(json: Json = False) -> None:
    """Show the live pipelines: which stage holds which layers on which device."""
    with transaction() as connection:
        found = live_pipelines(connection)
    show.each(found, json=json, table=show.pipelines_table)


@cli.command(rich_help_panel=INSTALLATION)
def models(json: Json = False) -> None:
    """Show the models that stages have registered, with their adapters."""
    names = (
        "name",
        "revision",
        "context_length",
        "vocab_size",
        "fingerprint",
        "adapters",
        "updated_at",
    )
    with transaction() as connection:
        rows = get_models(connection)
        live = live_pipelines(connection)
    ready = {pipeline.model for pipeline in live if pipeline.ready}
    found = [{**{name: row[name] for name in names}, "ready": row["name"] in ready} for row in rows]
    show.each(found, json=json, table=show.models_table)


# The order of this file is the order of the help: what people use first, first.
cli.command("run-batch", rich_help_panel=JOBS)(run_batch)
cli.add_typer(dead, name="dead", rich_help_panel=JOBS)
cli.add_typer(schedule, name="schedule", rich_help_panel=JOBS)
cli.add_typer(webhooks, name="webhooks", rich_help_panel=JOBS)
cli.command(rich_help_panel=INSTALLATION)(top)
cli.command(rich_help_panel=INSTALLATION)(doctor)
cli.add_typer(keys, name="keys", rich_help_panel=INSTALLATION)
cli.add_typer(tenant, name="tenant", rich_help_panel=INSTALLATION)
cli.command(rich_help_panel=INSTALLATION)(pause)
cli.command(rich_help_panel=INSTALLATION)(resume)
cli.command(rich_help_panel=INSTALLATION)(audit)
cli.command(rich_help_panel=INSTALLATION)(cost)
cli.command(rich_help_panel=INSTALLATION)(usage)
cli.command(rich_help_panel=INSTALLATION)(trace)
for command in sorted(entry_points(group=MORE_COMMANDS)):
    # The wheel for producers names the commands of shardline_fleet, and has not its code.
    if find_spec(command.module.partition(".")[0]):
        cli.command(rich_help_panel=DEVICES)(command.load())


def _given(**fields: object) -> dict[str, object]:
    """Returns the fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def _wait(client: Client, ids: list[UUID], timeout_s: float | None, *, json: bool) -> None:
    jobs = client.wait(ids, timeout_s, must_succeed=False)
    for job in jobs:
        if json:
            show.as_json(job)
        elif job.result is not None:
            show.output(job.result)
    for job in jobs:
        succeeded(job)


def _stream(client: Client, job_id: UUID, *, json: bool) -> None:
    for delta in client.stream(job_id):
        show.as_json(delta) if json else show.completion(delta.text, nl=delta.state is not None)


def _check(text: str, fields: Mapping[str, Any]) -> None:
    """Raises Invalid for what no model takes, before Postgres is asked about the model."""
    of_texts = {name: value for name, value in fields.items() if name not in OF_CHATS}
    request_of("any", text, of_texts, DEFAULT_TENANT)


def _choose_model(name: str | None) -> ModelChoice:
    """The named model, or the only one that is registered. Raises Invalid where that is none, or
    not the only one."""
    with transaction() as connection:
        choices = model_choices(connection)
    if name is not None:
        # One that is not registered yet waits for it, and `model:adapter` chats as its model does.
        known = [
            each
            for each in choices
            if name in (each.name, f"{each.name}:{name.rpartition(':')[2]}")
        ]
        return ModelChoice(
            name=name, has_chat_template=any(each.has_chat_template for each in known)
        )
    if len(choices) != 1:
        names = ", ".join(each.name for each in choices) or "none yet"
        problem = f"{len(choices)} models are registered, so it must be named"
        raise Invalid("--model", problem, f"Use one of: {names}")
    return choices[0]
