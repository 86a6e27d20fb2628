"""`shardline plan`: which device should compute which layers, and what that gives. Reads files
only."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardline.base.errors import Invalid
from shardline.cli import show
from shardline.cli.arguments import Json
from shardline_costs import (
    DeviceProfile,
    Goal,
    ModelCosts,
    PipelinePlan,
    Plans,
    StagePlan,
    Workload,
    read_profiles,
)
from shardline_fleet.planner import make_plans

USUAL = Workload()
BAR_CHARS = 12
HELD_UP = 0.95
"""If the busiest stage is less busy than this, people are shown why."""
SVG_CHARS = 110
CACHE = Path.home() / ".cache" / "shardline"


def plan(
    model: Annotated[
        Path,
        typer.Option("--model", "-m", help="The model's folder or GGUF file: its config is read."),
    ],
    devices: Annotated[
        list[Path] | None,
        typer.Option(
            "--devices",
            "-d",
            help="Files with what `python -m services.stage profile` printed, or folders of them.",
        ),
    ] = None,
    *,
    cache_dir: Annotated[
        Path,
        typer.Option(
            envvar="SHARDLINE_CACHE_DIR", help="Without --devices: its profiles of this model."
        ),
    ] = CACHE,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = USUAL.prompt,
    output: Annotated[int, typer.Option(min=2, help="Tokens of a completion.")] = USUAL.output,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Requests at a time.")
    ] = USUAL.concurrency,
    goal: Annotated[Goal, typer.Option(help="What to make as good as can be.")] = Goal.THROUGHPUT,
    stages: Annotated[
        int | None, typer.Option(min=1, help="Stages of a pipeline; default: the best number.")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Pipelines; default: the best number.")
    ] = None,
    hour_cost: Annotated[
        list[str] | None,
        typer.Option(
            help="Money for an hour of a device, such as cuda:0=2.50; "
            "adds the cost of a million tokens."
        ),
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw the plans into this file too.")] = None,
    json: Json = False,
) -> None:
    """Show the best plan of a model over measured devices, the next best, and what is predicted of
    each."""
    costs = ModelCosts.read(model)
    cached = cache_dir / "profiles"
    profiles = _profiles(devices or ([cached] if cached.is_dir() else []), costs)
    workload = Workload(prompt=prompt, output=output, concurrency=concurrency)
    hour_costs = _hour_costs(hour_cost or [], profiles)
    plans = make_plans(costs, profiles, workload, goal, num_stages=stages, replicas=replicas)
    if svg is not None:
        drawing = Console(record=True, width=SVG_CHARS, file=io.StringIO())
        _draw(drawing, plans, workload, hour_costs)
        drawing.save_svg(str(svg), title=f"shardline plan: {model.name}")
    if json:
        known = msgspec.to_builtins(plans)
        show.as_json({**known, **_costs_of(plans, hour_costs)} if hour_costs else plans)
    else:
        _draw(Console(highlight=False), plans, workload, hour_costs)


def _profiles(paths: list[Path], model: ModelCosts) -> list[DeviceProfile]:
    """Those of this model."""
    files = [
        file
        for path in paths
        for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])
    ]
    found: list[DeviceProfile] = []
    for file in files:
        try:
            found += read_profiles(file.read_bytes())
        except OSError as error:
            raise Invalid(
                "--devices", f"{file} cannot be read: {error.strerror}", "Check the path"
            ) from error
    of_model = [profile for profile in found if profile.model == model.shapes_id]
    if not of_model:
        raise Invalid(
            "--devices",
            f"none of {len(found)} profiles is of this model",
            "Run `python -m services.stage profile` on each device with SHARDLINE_MODEL, "
            "SHARDLINE_DTYPE and SHARDLINE_DEVICE set",
        )
    return sorted(of_model, key=lambda profile: (profile.host, profile.device, profile.way))


def _hour_costs(given: list[str], profiles: list[DeviceProfile]) -> dict[str, float]:
    """Returns the costs by device. Without any: nothing is asked of costs."""
    found: dict[str, float] = {}
    for each in given:
        device, _, amount = each.rpartition("=")
        try:
            found[device] = float(amount)
        except ValueError as error:
            raise Invalid(
                "--hour-cost", f"{each!r} is no device and amount", "Write cuda:0=2.50"
            ) from error
    missing = sorted({profile.device for profile in profiles} - found.keys())
    if found and missing:
        raise Invalid(
            "--hour-cost",
            f"{', '.join(missing)} has none",
            "Give one for each device, 0 if it is free",
        )
    return found


def _costs_of(plans: Plans, hour_costs: Mapping[str, float]) -> dict[str, list[float]]:
    """Returns the costs of the best plan and the next ones, in their order."""
    return {
        "cost_per_million": [
            plan.cost_per_million(hour_costs) for plan in (plans.best, *plans.others)
        ]
    }


def _draw(
    console: Console, plans: Plans, workload: Workload, hour_costs: Mapping[str, float]
) -> None:
    best = plans.best
    load = f"{workload.concurrency} x {workload.prompt} tokens in, {workload.output} out"
    console.print(
        f"[bold]best for {plans.goal}[/bold] of {load}: {' + '.join(map(_shape, best.pipelines))}"
    )
    for pipeline in best.pipelines:
        if len(best.pipelines) > 1:
            requests = f"{pipeline.concurrency} requests at a time in each replica"
            console.print(
                f"[bold]{_shape(pipeline)}[/bold]: {requests}, "
                f"{pipeline.tokens_per_s:,.1f} tokens/s"
            )
        console.print(_stages(pipeline))
        busy_share = pipeline.stages[pipeline.bottleneck].busy_share
        if busy_share < HELD_UP:
            waits = f"the busiest stage waits {1 - busy_share:.0%}"
            console.print(f"[red]links between machines hold steps up[/red]: {waits}")
    console.print(_table_of(plans, hour_costs))


def _shape(pipeline: PipelinePlan) -> str:
    replicas = f", {pipeline.replicas} replicas" if pipeline.replicas > 1 else ""
    return f"{len(pipeline.stages)} {'stage' if len(pipeline.stages) == 1 else 'stages'}{replicas}"


def _stages(plan: PipelinePlan) -> Table:
    """Stages in order; the busiest is red."""
    table = _table("stage", "device", "dtype", "layers", "busy", "weights", "KV tokens")
    for place, stage in enumerate(plan.stages):
        bar = "█" * round(BAR_CHARS * stage.busy_share)
        color = "red" if place == plan.bottleneck else "green"
        table.add_row(
            str(place),
            escape(
                "\n".join(f"{name.device} on {name.host}{_ranks(stage)}" for name in stage.devices)
            ),
            stage.dtype,
            stage.layers,
            f"[{color}]{bar:<{BAR_CHARS}}[/]{stage.busy_share:5.0%}",
            _weights(stage),
            f"{stage.kv_tokens:,}",
        )
    return table


def _ranks(stage: StagePlan) -> str:
    return f", {stage.ranks} ranks" if stage.ranks > 1 else ""


def _weights(stage: StagePlan) -> str:
    streamed = (
        f", {stage.streamed_bytes / 2**20:,.0f} read in each step" if stage.streamed_bytes else ""
    )
    return f"{stage.weight_bytes / 2**20:,.0f} MiB{streamed}"


def _table_of(plans: Plans, hour_costs: Mapping[str, float]) -> Table:
    """The best plan, the next ones, and the even splits."""
    columns = ("", "split", "devices", "tokens/s", "first", "next", "KV tokens", "time")
    table = _table(*columns, *(["cost/M"] if hour_costs else []))
    shown = [(f"{number}.", plan) for number, plan in enumerate((plans.best, *plans.others), 1)]
    for name, plan in [*shown, *([("even", plans.even)] if plans.even is not None else [])]:
        table.add_row(
            name,
            plan.split,
            escape(" + ".join(map(_devices, plan.pipelines))),
            f"{plan.tokens_per_s:,.1f}",
            f"{plan.ttft_s * 1e3:,.0f} ms",
            f"{plan.token_s * 1e3:,.1f} ms",
            f"{plan.kv_tokens:,}",
            f"{plans.cost(plan):.2f} x",
            *([f"{plan.cost_per_million(hour_costs):.3g}"] if hour_costs else []),
        )
    return table


def _devices(pipeline: PipelinePlan) -> str:
    replicas = f" ({pipeline.replicas} replicas)" if pipeline.replicas > 1 else ""
    return ", ".join(stage.devices[0].device for stage in pipeline.stages) + replicas


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, padding=(0, 2, 0, 0))
