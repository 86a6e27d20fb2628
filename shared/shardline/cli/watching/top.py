"""`shardline top`: what the installation does right now, again and again. Counts nothing itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from threading import Event
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shardline.base.config import Settings
from shardline.cli import show
from shardline.cli.arguments import Json
from shardline.client.database import reachable
from shardline.store.connection.database import connect
from shardline.store.statistics.overview import (
    MAX_COUNTED,
    ModelLoad,
    OpenJobs,
    Overview,
    PipelineLoad,
    overview,
)

MAX_TENANTS = 10
"""Those with the most open jobs."""
COUNTED = ("queued", "running", "paused", "for parents")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRate:
    """What a pipeline did between two looks; None if that is not known."""

    tokens_per_s: float | None = None
    watts: float | None = None


def top(
    *,
    every: Annotated[float, typer.Option(min=0.5, max=3600, help="Seconds between looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look and end.")] = False,
    json: Json = False,
) -> None:
    """Watch pipelines, queues and tenants; Ctrl-C ends it."""
    console = Console(highlight=False)
    try:
        if json or once or not console.is_terminal:
            for now, speeds in islice(looks(every), 1 if once else None):
                if json:
                    show.as_json(document(now, speeds))
                else:
                    console.print(screen(now, speeds))
        else:
            with Live(console=console, auto_refresh=False, screen=True) as live:
                for now, speeds in looks(every):
                    live.update(screen(now, speeds), refresh=True)
    except KeyboardInterrupt:
        return


def looks(every_s: float) -> Iterator[tuple[Overview, dict[str, TokenRate]]]:
    """Yields what is there after each pause, and what pipelines did in it. Raises Unavailable."""
    engine = connect(Settings().database_url.get_secret_value())
    never = Event()
    before = None
    try:
        while True:
            with reachable(), engine.begin() as connection:
                now = overview(connection)
            if before is not None:
                yield now, speeds_between(before, now)
            before = now
            never.wait(every_s)
    finally:
        engine.dispose()


def speeds_between(before: Overview, now: Overview) -> dict[str, TokenRate]:
    """Returns each pipeline's speed between two looks. A new epoch begins to count again."""
    seconds = (now.taken_at - before.taken_at).total_seconds()
    then = {each.pipeline.id: each for each in before.pipelines}
    return {
        each.pipeline.id: _speed(then.get(each.pipeline.id), each, seconds)
        for each in now.pipelines
    }


def _speed(before: PipelineLoad | None, now: PipelineLoad, seconds: float) -> TokenRate:
    if before is None or before.pipeline.epoch != now.pipeline.epoch or seconds <= 0:
        return TokenRate()
    if now.num_rows is None or now.energy_j is None:
        return TokenRate()
    return TokenRate(
        tokens_per_s=(now.num_rows - (before.num_rows or 0)) / seconds,
        watts=(now.energy_j - (before.energy_j or 0.0)) / seconds,
    )


def document(now: Overview, speeds: Mapping[str, TokenRate]) -> dict[str, Any]:
    """Returns what `--json` prints of one look."""
    return {
        "taken_at": now.taken_at,
        "models": [asdict(each) for each in now.models],
        "pipelines": [
            {
                "pipeline": each.pipeline,
                "num_running": each.num_running,
                **asdict(speeds[each.pipeline.id]),
            }
            for each in now.pipelines
        ],
        "tenants": {name: asdict(jobs) for name, jobs in now.tenants.items()},
    }


def screen(now: Overview, speeds: Mapping[str, TokenRate]) -> Group:
    """Returns the tables of one look."""
    return Group(
        Text(f"{now.taken_at.astimezone():%Y-%m-%d %H:%M:%S}", style="dim"),
        _models_table(now.models),
        Text(),
        _pipelines_table(now.pipelines, speeds),
        Text(),
        _tenants_table(now.tenants),
    )


def _models_table(models: Iterable[ModelLoad]) -> Table:
    table = show.new_table("model", *COUNTED, "oldest waits")
    for each in models:
        table.add_row(each.model, *_counts(each.jobs), f"{each.oldest_s:,.0f} s")
    return table


def _pipelines_table(pipelines: Iterable[PipelineLoad], speeds: Mapping[str, TokenRate]) -> Table:
    table = show.new_table(
        "pipeline", "model", "state", "running", "seats", "tokens/s", "W", "layers", "device"
    )
    for each in pipelines:
        pipeline, speed = each.pipeline, speeds[each.pipeline.id]
        row: list[str | Text] = [
            pipeline.id,
            pipeline.model,
            show.readiness(pipeline),
            f"{each.num_running:,}",
            f"{pipeline.seats:,}",
            _number(speed.tokens_per_s),
            _number(speed.watts),
        ]
        for stage in pipeline.stages or [{}]:
            table.add_row(*row, show.layers(stage), str(stage.get("device", "")))
            row = ["" for _ in row]
    return table


def _tenants_table(tenants: Mapping[str, OpenJobs]) -> Table:
    table = show.new_table("tenant", *COUNTED)
    busiest = sorted(
        tenants.items(), key=lambda pair: (-pair[1].num_queued - pair[1].num_running, pair[0])
    )
    for name, jobs in busiest[:MAX_TENANTS]:
        table.add_row(name, *_counts(jobs))
    return table


def _counts(jobs: OpenJobs) -> list[str]:
    return [
        f"{number:,}{'+' if number >= MAX_COUNTED else ''}"
        for number in (jobs.num_queued, jobs.num_running, jobs.num_paused, jobs.num_waiting)
    ]


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f}"
