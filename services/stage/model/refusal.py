"""How a model is refused: by name, with the remedy."""

from __future__ import annotations

from typing import Never

from shardline.errors import Invalid

FIELD = "SHARDLINE_MODEL"


def refuse(problem: str, remedy: str = "Choose another model", cause: Exception | None = None) -> Never:
    """This model can never work here. Raises Invalid."""
    raise Invalid(FIELD, problem, remedy) from cause
