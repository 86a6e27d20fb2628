"""How an outcome looks in a terminal, and as a picture. Computes nothing."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shardline.base.rounding import ceil_div
from shardline_fleet.simulator.outcome import Outcome
from shardline_fleet.simulator.tally import Spread

SVG_CHARS = 110
PLOT_ROWS = 20
PLOT_CHARS = 50


def show(outcome: Outcome) -> None:
    """Prints it."""
    draw(Console(highlight=False), outcome)


def save_svg(outcome: Outcome, path: Path, title: str) -> None:
    """Draws the same into a file."""
    drawing = Console(record=True, width=SVG_CHARS, file=io.StringIO())
    draw(drawing, outcome)
    drawing.save_svg(str(path), title=title)


def draw(console: Console, outcome: Outcome) -> None:
    """Tables and the plot."""
    fleet = outcome.fleet
    sampled = (
        "" if fleet.simulated_cells == fleet.cells else f" (simulated: {fleet.simulated_cells})"
    )
    console.print(
        f"[bold]{fleet.devices:,} devices[/bold] in {fleet.cells:,} cells{sampled}: "
        f"{fleet.pipelines:,.0f} pipelines, {fleet.stages:,.0f} stages"
    )
    for plan in fleet.plans:
        console.print(f"layers: {plan}")
    console.print(_figures(outcome))
    console.print(_latencies(outcome))
    console.print(_plot(outcome))
    console.print(_servers(outcome))


def _figures(outcome: Outcome) -> Table:
    table = _table(outcome.scenario.value, "")
    table.add_row("output tokens/s", f"{outcome.tokens_per_s:,.0f}")
    table.add_row("predicted, all seats taken", f"{outcome.fleet.predicted_tokens_per_s:,.0f}")
    table.add_row(
        "jobs", f"{outcome.jobs:,.0f} in {outcome.seconds:,.1f} s: {outcome.jobs_per_s:,.2f}/s"
    )
    if outcome.unfinished or outcome.failed:
        table.add_row(
            "[red]unfinished, failed[/red]", f"{outcome.unfinished:,.0f}, {outcome.failed:,.0f}"
        )
    if outcome.keeps_bounds is not None:
        table.add_row(
            "keeps its bounds", "[green]yes[/green]" if outcome.keeps_bounds else "[red]no[/red]"
        )
    if outcome.held_up:
        table.add_row("held up by faults", f"{outcome.held_up:,.0f} jobs")
        table.add_row("tokens computed again", f"{outcome.tokens_again:,.0f}")
    return table


def _latencies(outcome: Outcome) -> Table:
    table = _table("", "p50", "p99", "worst")
    _add(table, "first token", outcome.ttft_s)
    _add(table, "between tokens", outcome.token_s)
    _add(table, "whole request", outcome.request_s)
    if outcome.held_up:
        _add(table, "held up", outcome.held_up_s)
    return table


def _add(table: Table, name: str, spread: Spread) -> None:
    table.add_row(
        name, *(f"{seconds * 1e3:,.1f} ms" for seconds in (spread.p50, spread.p99, spread.worst))
    )


def _plot(outcome: Outcome) -> Table:
    """Output tokens/s over time, in rows of equal length."""
    num = ceil_div(len(outcome.timeline), PLOT_ROWS)
    parts = [
        outcome.timeline[begin : begin + num] for begin in range(0, len(outcome.timeline), num)
    ]
    speeds = [sum(part) / len(part) for part in parts]
    most = max(speeds, default=0.0) or 1.0
    table = _table("from", "output tokens/s", "")
    for place, speed in enumerate(speeds):
        table.add_row(f"{place * num} s", f"{speed:,.0f}", "█" * round(PLOT_CHARS * speed / most))
    return table


def _servers(outcome: Outcome) -> Table:
    table = _table("as one stack", "", "", "")
    for load in outcome.servers:
        amount = f"{load.amount:,.2f}" if load.unit == "cores" else f"{load.amount:,.0f}"
        color = "red" if load.breaks else "default"
        most = "" if load.limit is None else f"of {load.limit:,.0f}"
        table.add_row(load.server, load.what, f"[{color}]{amount} {load.unit}[/]", most)
    return table


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, padding=(0, 2, 0, 0))
