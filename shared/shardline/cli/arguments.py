"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from uuid import UUID

import typer

Json = Annotated[bool, typer.Option("--json", help="One JSON document a line.")]
JobId = Annotated[UUID, typer.Argument(metavar="JOB", help="The job's id.")]
JobIds = Annotated[list[UUID], typer.Argument(metavar="JOB...", help="Ids of jobs.")]
ToolFiles = Annotated[
    list[Path] | None,
    typer.Option("--tool", help="A file with a tool that the model may call."),
]
SchemaFile = Annotated[
    Path | None, typer.Option("--schema", help="A file with the JSON schema of the completion.")
]
After = Annotated[
    list[str] | None,
    typer.Option(
        "--after", help="A job that ends before: ID, or ID=NAME for its text as {{NAME}}."
    ),
]
