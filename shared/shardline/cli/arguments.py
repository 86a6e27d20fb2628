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
ChatOption = Annotated[
    bool | None,
    typer.Option(
        "--chat/--text",
        help="The prompt is a user's message, or a text to complete. "
        "Default: --chat for chat models.",
    ),
]
FieldsOption = Annotated[
    list[str] | None,
    typer.Option("--field", "-f", help="Any other field: -f top_p=0.9 -f 'stop=[\"\\n\"]'."),
]
AttemptsOption = Annotated[
    int | None, typer.Option(help="Failed attempts with which the job ends, 1 to 32.")
]
BackoffOption = Annotated[
    float | None, typer.Option(help="Seconds before the second attempt, then doubled.")
]
MaxBackoffOption = Annotated[float | None, typer.Option(help="Seconds that a wait has at most.")]
RetryOption = Annotated[
    list[str] | None,
    typer.Option(help="Failures that are tried again: crashed (the default), engine."),
]
After = Annotated[
    list[str] | None,
    typer.Option(
        "--after", help="A job that ends before: ID, or ID=NAME for its text as {{NAME}}."
    ),
]
