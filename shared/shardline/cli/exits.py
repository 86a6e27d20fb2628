"""Errors as one line on standard error and an exit status that scripts can act on. Knows no
command."""

from __future__ import annotations

from typing import Any, NoReturn

import typer
from pydantic import ValidationError
from typer.core import TyperGroup
from typing_extensions import override

from shardline.base.config import ENV_PREFIX
from shardline.base.errors import Conflict, Invalid, JobEnded, NotFound, Unavailable
from shardline.cli.show import printable

STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (JobEnded, 1),
    (Invalid, 2),
    (Conflict, 2),
    (NotFound, 3),
    (Unavailable, 4),
    (TimeoutError, 124),
)

HELP = (
    "Exit status: 0 done, 1 a job ended without a completion, 2 wrong request or setting, "
    "3 no such job or key, 4 a server cannot be reached, 124 time is over."
)


class Reporting(TyperGroup):
    """A group of commands; reports foreseeable errors without a traceback."""

    @override
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ValidationError as error:
            for each in error.errors():
                name = ENV_PREFIX + "_".join(map(str, each["loc"])).upper()
                typer.echo(f"{name}: {each['msg']}", err=True)
            raise typer.Exit(2) from error
        except tuple(kind for kind, _ in STATUSES) as error:
            _leave(
                str(error),
                next(status for kind, status in STATUSES if isinstance(error, kind)),
                error,
            )


def _leave(message: str, status: int, cause: Exception) -> NoReturn:
    typer.echo(printable(message.strip()), err=True)
    raise typer.Exit(status) from cause
