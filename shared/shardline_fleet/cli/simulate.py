"""`shardline simulate` and `shardline tune`: what a fleet of any size would do, and which settings
suit its load.

A simulation runs in a separate process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from shardline.base.config import ENV_PREFIX
from shardline_fleet.simulator.fleet_file import FleetFile, read_fleet
from shardline_fleet.simulator.tuning import Candidate, Setting, Trial, Tuner, TuningGoal

MODULE = "shardline_fleet.simulator"


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
    """Simulate a fleet with the product's scheduler and planner."""
    svg_option = ["--svg", str(svg)] if svg is not None else []
    options = [str(file), *svg_option, *(["--json"] if json else [])]
    done = subprocess.run([sys.executable, "-m", MODULE, *options], check=False)
    raise typer.Exit(done.returncode)


def tune(
    file: Annotated[Path, typer.Argument(help="The fleet and its load, in YAML: docs/tuning.md.")],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile to write.")] = Path(
        "tuned.env"
    ),
    goal: Annotated[
        TuningGoal, typer.Option(help="What to make as good as can be.")
    ] = TuningGoal.TOKENS_PER_S,
    trials: Annotated[int, typer.Option(min=1, max=10_000, help="Settings to simulate.")] = 60,
    keep: Annotated[
        list[Setting] | None, typer.Option(help="Left as in the file; may be repeated.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON document instead of lines.")
    ] = False,
) -> None:
    """Search the settings that suit a load best, and write them as a profile for stages (an
    experiment)."""
    fleet = read_fleet(file)
    tuner = Tuner(fleet, file.parent, goal, keep or ())
    default, best, gain = tuner.run(
        trials, lambda number, trial: None if json else typer.echo(_line(number, trial))
    )
    verdict = f"{gain:.2f} times as good as the default settings, with other seeds too"
    if best is default:
        verdict = "the default settings: nothing was better with other seeds too"
    elif default.outcome is not None and default.outcome.keeps_bounds is False:
        verdict = (
            "nearer to the bounds of the load, which the default settings break, "
            "with other seeds too"
        )
    settings = profile_settings(fleet, best.candidate)
    lines = [
        f"{ENV_PREFIX}{name.upper()}={value}"
        for name, value in settings.items()
        if value is not None
    ]
    comment = f"# By `shardline tune {file.name}` for {goal}, simulated: {verdict}."
    output.write_text("\n".join([comment, *lines, ""]), encoding="utf-8")
    if json:
        typer.echo(msgspec.json.encode({"gain": gain, "default": default, "best": best}).decode())
    else:
        typer.echo("\n".join([*lines, verdict, f"{output} is written"]))


def profile_settings(fleet: FleetFile, candidate: Candidate) -> dict[str, object]:
    """Values by the names that stages and `make up` have for them; a split comes with its number of
    stages."""
    settings: dict[str, object] = {setting.value: value for setting, value in candidate.items()}
    if split := candidate[Setting.SPLIT]:
        num_stages = str(split).count(",") + 1
        replicas = sum(fleet.cells[0].devices.values()) // num_stages
        settings |= {"num_stages": num_stages, "stages": num_stages, "replicas": replicas}
    return settings


def _line(number: int, trial: Trial) -> str:
    settings = ", ".join(
        f"{setting} {'-' if value is None else value}" for setting, value in trial.candidate.items()
    )
    speed = (
        f"{trial.outcome.tokens_per_s:,.1f} tokens/s" if trial.outcome is not None else "cannot run"
    )
    cost = f", {trial.cost:.4g} s by the goal" if trial.cost is not None else ""
    return f"{number}: {settings}: {speed}{cost}"
