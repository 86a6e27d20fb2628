"""`python -m shardline_fleet.simulator.tuning fleet.yaml`: the settings that suit a load best, as a profile."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from shardline.base.errors import Invalid
from shardline_fleet.simulator.fleet_file import read_fleet
from shardline_fleet.simulator.tuning.goal import TuningGoal
from shardline_fleet.simulator.tuning.space import Setting, Space

if find_spec("optuna") is None:
    raise SystemExit("shardline tune needs Optuna: pip install 'shardline[tune]'")

from shardline_fleet.simulator.tuning import report
from shardline_fleet.simulator.tuning.tuner import Tuner

INVALID_STATUS = 2


def tune(
    file: Annotated[Path, typer.Argument(help="The fleet and its load, in YAML: docs/capacity.md.")],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile to write.")] = Path("tuned.env"),
    goal: Annotated[TuningGoal, typer.Option(help="What to make as good as can be.")] = TuningGoal.TOKENS_PER_S,
    trials: Annotated[int, typer.Option(min=1, max=10_000, help="Settings to simulate.")] = 60,
    keep: Annotated[
        list[Setting] | None, typer.Option(help="A setting to leave as the file says; may be repeated.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document instead of lines and a table.")] = False,
) -> None:
    """Search the settings that suit a load best in the simulator, and write them as a profile."""
    console = Console(highlight=False, quiet=json)
    try:
        fleet = read_fleet(file)
        space = Space.of(fleet, file.parent, keep or ())
        tuner = Tuner(fleet, file.parent, goal, space)
        tuned = tuner.run(trials, lambda number, tried: None if json else typer.echo(report.progress(number, tried)))
    except Invalid as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(INVALID_STATUS) from error
    output.write_text(report.tuned_profile(fleet, tuned, goal, file.name), encoding="utf-8")
    if json:
        found = {"gain": tuned.gain, "default": tuned.default, "best": tuned.best}
        typer.echo(msgspec.json.encode(found).decode())
    report.show(console, tuned, space.searched)
    console.print(f"{output} is written")


if __name__ == "__main__":
    typer.run(tune)
