"""`python -m tests.faults`: one chaos run, told while it goes on. Ends with 0 only if every invariant held."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated

import typer
from rich.console import Console

from tests.faults.catalogue import chosen
from tests.faults.report import FILE, show, write
from tests.faults.runner import run
from tests.faults.world import LOGS_KEPT, Options, no_foreign_settings

console = Console(highlight=False)


def main(
    seed: Annotated[int | None, typer.Option(help="draws the faults; default: a new one, which is printed")] = None,
    minutes: Annotated[float, typer.Option(help="how long faults are injected")] = 2.0,
    faults: Annotated[str, typer.Option(help="all, or groups and kinds with commas between them")] = "all",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    stages: Annotated[int, typer.Option(help="stages of the pipeline")] = 2,
) -> None:
    """Hurt a stack of its own under load and judge what comes of it; figures in .local/chaos.json."""
    # Whoever ends us early must not leave a stack behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    no_foreign_settings()
    seed = int.from_bytes(os.urandom(4)) if seed is None else seed
    options = Options(seed=seed, minutes=minutes, faults=faults, dtype=dtype, stages=stages)
    again = f"make chaos SEED={seed} MINUTES={minutes:g} FAULTS={faults!r} DTYPE={dtype} STAGES={stages}"
    try:
        wanted = chosen(faults)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--faults") from error
    console.print(f"[bold]{again}[/bold]")
    with console.status("chaos") as status:

        def say(line: str) -> None:
            console.print(line, markup=False)
            status.update(line)

        report = run(options, wanted, say)
    write(report)
    show(report, console)
    console.print(f"figures: {FILE}, logs: {LOGS_KEPT}; again: {again}")
    sys.exit(0 if report.holds else 1)


if __name__ == "__main__":
    typer.run(main)
