"""What a service prints about settings that can never work: a line for each, and an exit status.
Knows no setting."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from shardline.base.config import ENV_PREFIX
from shardline.base.errors import Invalid

REFUSED_STATUS = 2
"""Of a service that refuses its settings: starting it again does not help."""


@contextmanager
def refusing() -> Iterator[None]:
    """Ends the process with REFUSED_STATUS if a setting is wrong; values, which may be secret, are
    not repeated."""
    try:
        yield
    except Invalid as error:
        _refuse(f"{_variable(error.field)}: {error.problem}. {error.remedy}", error)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        _refuse(
            "\n".join(
                f"{_variable('_'.join(map(str, each['loc'])))}: {each['msg']}" for each in problems
            ),
            error,
        )


def _variable(field: str) -> str:
    return f"{ENV_PREFIX}{field.upper()}"


def _refuse(message: str, error: Exception) -> None:
    sys.stderr.write(f"{message}\n")
    raise SystemExit(REFUSED_STATUS) from error
