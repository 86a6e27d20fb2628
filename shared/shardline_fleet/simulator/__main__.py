"""`python -m shardline_fleet.simulator fleet.yaml`: what a fleet of any size would do, and what
faults cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from shardline.base.errors import Invalid
from shardline_fleet.simulator import report
from shardline_fleet.simulator.fleet_file import read_fleet
from shardline_fleet.simulator.simulation import Simulation

INVALID_STATUS = 2


def simulate(
    file: Annotated[
        Path, typer.Argument(help="The fleet, its load and its faults, in YAML: docs/capacity.md.")
    ],
    *,
    svg: Annotated[Path | None, typer.Option(help="Draw the outcome into this file too.")] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON document instead of tables.")
    ] = False,
) -> None:
    """Simulate a fleet with the product's scheduler and planner, on a virtual clock."""
    try:
        outcome = Simulation(read_fleet(file), file.parent).run()
    except Invalid as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(INVALID_STATUS) from error
    if svg is not None:
        report.save_svg(outcome, svg, title=f"shardline simulate: {file.name}")
    if json:
        typer.echo(msgspec.json.encode(outcome).decode())
    else:
        report.show(outcome)


if __name__ == "__main__":
    typer.run(simulate)
