"""`shardline simulate` and `shardline tune`: what a fleet of any size would do, and with which settings it does best.
Each runs in a process of its own: a simulation takes all of a core."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

MODULE = "shardline_fleet.simulator"
TUNING = "shardline_fleet.simulator.tuning"


def simulate(
    file: Annotated[Path, typer.Argument(help="The fleet, its load and its faults, in YAML: docs/capacity.md.")],
    *,
    svg: Annotated[Path | None, typer.Option(help="Draw the outcome into this file too.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document instead of tables.")] = False,
) -> None:
    """Simulate a fleet with the product's scheduler and planner."""
    svg_option = ["--svg", str(svg)] if svg is not None else []
    _start(MODULE, [str(file), *svg_option, *(["--json"] if json else [])])


def tune(
    file: Annotated[Path, typer.Argument(help="The fleet and its load, in YAML: docs/tuning.md.")],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile to write.")] = Path("tuned.env"),
    goal: Annotated[
        str, typer.Option(help="tokens-per-s, or ttft-p50, ttft-p99, request-p50, request-p99.")
    ] = "tokens-per-s",
    trials: Annotated[int, typer.Option(min=1, max=10_000, help="Settings to simulate.")] = 60,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="seats, token_budget, lanes, split or dtype: left as the file says; may be repeated."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document instead of lines and a table.")] = False,
) -> None:
    """Search the settings that suit a load best, and write them as a profile for stages."""
    kept = [option for each in keep or () for option in ("--keep", each)]
    options = ["--output", str(output), "--goal", goal, "--trials", str(trials), *kept]
    _start(TUNING, [str(file), *options, *(["--json"] if json else [])])


def _start(module: str, arguments: list[str]) -> NoReturn:
    done = subprocess.run([sys.executable, "-m", module, *arguments], check=False)
    raise typer.Exit(done.returncode)
