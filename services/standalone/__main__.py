"""`python -m services.standalone up | down | status | demo`: the command line. Knows no process."""

from __future__ import annotations

import sys
from contextlib import suppress

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from services.standalone.demo.run import run_demo
from services.standalone.down import StillRunning, stop_stack
from services.standalone.processes import StartFailed
from services.standalone.settings import StandaloneSettings
from services.standalone.state_dir import SUPERVISOR, AlreadyUp, StateDir
from services.standalone.supervisor import Supervisor
from shardline.base.errors import ShardlineError
from shardline.base.streams import escape_unencodable

cli = typer.Typer(
    add_completion=False, no_args_is_help=True, help="A whole Shardline stack on this machine."
)
console = Console(highlight=False)


@cli.command()
def up() -> None:
    """Start everything and follow it; Ctrl-C stops it."""
    Supervisor(StandaloneSettings(), say=_say).run()


@cli.command()
def down() -> None:
    """Stop the stack of this folder, also what a killed supervisor left behind."""
    settings = StandaloneSettings()
    for name in stop_stack(StateDir(settings.home), drain_s=settings.times.drain_s):
        _say(f"ended {name}")
    _say("nothing runs any more")


@cli.command()
def status() -> None:
    """Show what runs in this folder."""
    state_dir = StateDir(StandaloneSettings().home)
    alive = state_dir.alive()
    ready = state_dir.published() is not None and SUPERVISOR in alive
    table = Table(
        "process", "pid", "state", title=f"{state_dir.folder}: {'ready' if ready else 'not ready'}"
    )
    for name, entry in state_dir.recorded().items():
        table.add_row(name, str(entry.pid), "running" if name in alive else "gone")
    console.print(table if state_dir.recorded() else f"nothing runs in {state_dir.folder}")
    raise typer.Exit(0 if ready else 1)


@cli.command()
def demo() -> None:
    """300 prompts with known answers through all five doors of a separate stack."""
    raise typer.Exit(0 if run_demo(console) else 1)


def _say(line: str) -> None:
    # A closed pipe or a full disk must not end a stack.
    with suppress(OSError):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def main() -> int:
    """Run the command line; errors that a user can correct are printed in one line each, without a
    traceback."""
    escape_unencodable()
    try:
        cli()
    except ValidationError as error:
        for each in error.errors():
            _say(
                f"SHARDLINE_{'_'.join(map(str, each['loc'])).upper()}: {each['msg']}, "
                f"not {each['input']!r}"
            )
    except (ShardlineError, StartFailed, AlreadyUp, StillRunning) as error:
        _say(str(error))
    return 1


if __name__ == "__main__":
    sys.exit(main())
