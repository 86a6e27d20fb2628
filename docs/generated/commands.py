"""docs/reference/commands.md: the `shardline` command, the services' entry points, and the targets
of `make`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import typer

from docs.generated.tables import sentence, table
from shardline.cli.commands import cli
from shardline.cli.exits import HELP

REPOSITORY = Path(__file__).resolve().parents[2]
ENTRY_POINTS = (
    "services/gateway/__main__.py",
    "services/relay/__main__.py",
    "services/stage/__main__.py",
    "services/stage/device/listing.py",
    "services/stage/fleet/profiling.py",
    "services/standalone/__main__.py",
)
"""Modules whose docstring begins with the command that runs them."""

ENTRY_POINT = re.compile(r"(`python -m [^`]+`): (.+?)\.?(?:\s\(docs/\S+\))?\.?(?: Knows|$)")
TARGET = re.compile(r"^([a-z-]+):.*## (.+)$", re.MULTILINE)
"""As `make help` finds them."""

INTRODUCTION = """# Commands

`make documents` writes this page from the commands' own help.

## `shardline`

`pip install '.[cli]'`. `shardline COMMAND --help` lists the options; `--json` prints one JSON
document a line. Without `SHARDLINE_DATABASE_URL` and `SHARDLINE_REDIS_URL` it uses the stack that
`make up` runs in this folder.
"""


def page() -> str:
    """Returns the page in Markdown."""
    return "\n".join(
        [
            INTRODUCTION,
            *table("command", "does", rows=_commands(typer.main.get_command(cli))),
            f"{HELP}\n",
            "## Services\n",
            "Each takes its settings from the [environment](settings.md) and ends on SIGTERM.\n",
            *table("command", "runs", rows=map(_entry_point, ENTRY_POINTS)),
            "## `make`\n",
            *table("target", "does", rows=_targets()),
        ]
    )


def _commands(group: object, *before: str) -> Iterator[tuple[str, str]]:
    found = getattr(group, "commands", {})
    for name, command in found.items():
        if getattr(command, "commands", None):
            yield from _commands(command, *before, name)
        else:
            yield f"`{' '.join((*before, name))}`", sentence(command.get_short_help_str(limit=300))


def _entry_point(module: str) -> tuple[str, str]:
    docstring = (
        ast.get_docstring(ast.parse((REPOSITORY / module).read_text(encoding="utf-8"))) or ""
    )
    match = ENTRY_POINT.match(" ".join(docstring.partition("\n\n")[0].split()))
    assert match is not None, f"the docstring of {module} does not begin with its command"
    return match[1], sentence(match[2])


def _targets() -> Iterator[tuple[str, str]]:
    for name, text in TARGET.findall((REPOSITORY / "Makefile").read_text(encoding="utf-8")):
        yield f"`{name}`", text
