"""`shardline scale`: how many workers of a fleet the present load needs, or one that is given."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from shardline.base.errors import Invalid
from shardline.cli import show
from shardline.cli.arguments import Json
from shardline.cli.database import transaction
from shardline.store import fleets
from shardline.store.statistics.demand import Demand, demand
from shardline_costs import ModelCosts, Workload, profile_of
from shardline_fleet.deployment.scaling import MAX_WORKERS, FleetSize, Scaling

WINDOW_S = 900.0
DRAIN_S = 600.0
SHARE = 0.7


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers must do."""

    jobs_per_s: float
    """Those that come, and those that wait, spread over the time in which they are to end."""
    prompt: int
    output: int
    queued: int

    @property
    def tokens_per_s(self) -> float:
        """Output."""
        return self.jobs_per_s * self.output


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what the command prints."""

    model: str
    load: Load
    here: int
    needed: int | None
    """None: more than MAX_WORKERS, or none."""
    sizes: list[FleetSize]


def scale(
    *,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Default: the only one that a fleet has.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Required: workers are started by what runs them.")
    ] = False,
    window_s: Annotated[float, typer.Option(min=1, help="Seconds of load to average.")] = WINDOW_S,
    drain_s: Annotated[
        float, typer.Option(min=1, help="Seconds in which jobs that wait are to end.")
    ] = DRAIN_S,
    share: Annotated[
        float, typer.Option(min=0.05, max=1, help="Of the fleet's speed that the load may take.")
    ] = SHARE,
    rate: Annotated[
        float | None, typer.Option(min=0, help="Jobs a second, instead of those that came.")
    ] = None,
    prompt: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt, instead of their average.")
    ] = None,
    output: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a completion, instead of their average.")
    ] = None,
    json: Json = False,
) -> None:
    """Print how many workers of a fleet a load needs, by what its workers have measured."""
    if not dry_run:
        remedy = "Add --dry-run, then start or stop workers: docker compose up -d --scale stage=N"
        raise Invalid("--dry-run", "nothing here starts workers", remedy)
    with transaction() as connection:
        name = model or _only_fleet(fleets.fleets(connection))
        workers = fleets.workers_of(connection, name)
        asked = demand(connection, name, window_s)
    if not workers:
        raise Invalid(
            "--model",
            f"no worker of a fleet serves {name}",
            "Start one: its measurements are needed",
        )
    load = _load(asked, window_s, drain_s, rate=rate, prompt=prompt, output=output)
    answer = _answer(name, workers, load, share)
    show.as_json(answer) if json else _draw(answer, share)


def _only_fleet(models: list[str]) -> str:
    if len(models) != 1:
        known = ", ".join(models) or "none: its stages have numbers, or none runs"
        raise Invalid(
            "--model", f"{len(models)} models have a fleet, so it must be named", f"Fleets: {known}"
        )
    return models[0]


def _load(
    asked: Demand,
    window_s: float,
    drain_s: float,
    *,
    rate: float | None,
    prompt: int | None,
    output: int | None,
) -> Load:
    """What is given counts, else what was asked."""
    prompt = prompt or round(asked.prompt or 0)
    output = output or round(asked.output or 0)
    if not prompt or not output:
        problem = (
            f"no job of the last {window_s:g} s has succeeded, so the size of jobs is not known"
        )
        raise Invalid(
            "--prompt", problem, "Give --rate, --prompt and --output, or a longer --window-s"
        )
    arriving = asked.num_arrived / window_s if rate is None else rate
    return Load(
        jobs_per_s=arriving + asked.num_queued / drain_s,
        prompt=prompt,
        output=max(2, output),
        queued=asked.num_queued,
    )


def _answer(model: str, workers: list[fleets.FleetWorker], load: Load, share: float) -> Answer:
    """Reckons with what the workers have measured."""
    profiles = [
        profile_of({**each.profile, "device": each.worker}, f"profile of {each.worker}")
        for each in workers
    ]
    workload = Workload(prompt=load.prompt, output=load.output)
    scaling = Scaling(msgspec.convert(workers[0].shapes, ModelCosts), profiles, workload)
    needed = scaling.needed(load.tokens_per_s, share)
    shown = {
        len(workers),
        *(range(max(1, needed.workers - 1), needed.workers + 2) if needed else (MAX_WORKERS,)),
    }
    sizes = [
        size for num in sorted(shown) if (size := scaling.size(num, load.tokens_per_s)) is not None
    ]
    return Answer(
        model=model,
        load=load,
        here=len(workers),
        needed=needed.workers if needed else None,
        sizes=sizes,
    )


def _draw(answer: Answer, share: float) -> None:
    console = Console(highlight=False)
    load = answer.load
    console.print(
        f"[bold]{answer.model}[/bold]: {load.jobs_per_s:.2f} jobs/s of {load.prompt} tokens in, "
        f"{load.output} out ({load.queued} wait now): {load.tokens_per_s:,.0f} output tokens/s"
    )
    table = Table(
        "workers", "split", "pipelines", "tokens/s", "used", box=None, padding=(0, 2, 0, 0)
    )
    for size in answer.sizes:
        here = " (now)" if size.workers == answer.here else ""
        color = "green" if size.used <= share else "red"
        used = f"[{color}]{size.used:.0%}[/]"
        table.add_row(
            f"{size.workers}{here}",
            size.split,
            str(size.replicas),
            f"{size.tokens_per_s:,.0f}",
            used,
        )
    console.print(table)
    if answer.needed is None:
        console.print(
            f"needed: more than {MAX_WORKERS} workers of these kinds, at {share:.0%} of their speed"
        )
    else:
        console.print(
            f"needed: {answer.needed} workers, at {share:.0%} of their speed; "
            f"{answer.here} are here"
        )
