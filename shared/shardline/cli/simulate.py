"""`shardline simulate`: what a fleet of any size would do. Starts the simulator, which only the repository has."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated

import typer

from shardline.errors import Invalid

MODULE = "services.simulator"


def simulate(
    file: Annotated[Path, typer.Argument(help="The fleet, its load and its faults, in YAML: docs/capacity.md.")],
    *,
    svg: Annotated[Path | None, typer.Option(help="Draw the outcome into this file too.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document instead of tables.")] = False,
) -> None:
    """Simulate a fleet with the product's scheduler and planner. In the repository only."""
    here = Path.cwd()
    if PathFinder.find_spec("simulator", [str(here / "services")]) is None:
        raise Invalid("simulate", f"{here} has no {MODULE}", "Run it in the folder of Shardline's repository")
    arguments = [str(file), *(["--svg", str(svg)] if svg is not None else []), *(["--json"] if json else [])]
    done = subprocess.run([sys.executable, "-m", MODULE, *arguments], check=False)
    raise typer.Exit(done.returncode)
