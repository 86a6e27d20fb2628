"""Arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

import typer

Json = Annotated[bool, typer.Option("--json", help="One JSON document a line.")]
JobId = Annotated[UUID, typer.Argument(metavar="JOB", help="The job's id.")]
JobIds = Annotated[list[UUID], typer.Argument(metavar="JOB...", help="Ids of jobs.")]
