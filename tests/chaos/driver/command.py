"""What every chaos command does: draw a seed, tell the run as it goes on, write and show the
report. Knows no stack."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import typer
from rich.console import Console

from tests.chaos.driver.drawing import Groups, among
from tests.chaos.driver.storm import Say
from tests.chaos.faults.fault import Fault, StackT_contra
from tests.chaos.report.report import Report, show, write
from tests.stack import no_foreign_settings

console = Console(highlight=False)


def seeded(seed: int | None) -> int:
    """The caller's, or a new one."""
    return int.from_bytes(os.urandom(4)) if seed is None else seed


def wanted(faults: str, groups: Groups[StackT_contra]) -> Sequence[Fault[StackT_contra]]:
    """As `among`, for a command line."""
    try:
        return among(faults, groups)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--faults") from error


def conduct(again: str, run: Callable[[Say], Report], *, file: Path, logs: Path) -> None:
    """Ends the process: with 0 only if every invariant held."""
    # Whoever ends us early must not leave a stack behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    no_foreign_settings()
    console.print(f"[bold]{again}[/bold]")
    with console.status("chaos") as status:

        def say(line: str) -> None:
            console.print(line, markup=False)
            status.update(line)

        report = run(say)
    write(report, file)
    show(report, console)
    console.print(f"figures: {file}, logs: {logs}; again: {again}")
    sys.exit(0 if report.holds else 1)
