"""Refuses a model by name, with a remedy. Knows no rule by which it is refused."""

from __future__ import annotations

from typing import Never

from shardline.base.errors import Invalid

FIELD = "SHARDLINE_MODEL"


def refuse(
    problem: str, remedy: str = "Choose another model", cause: Exception | None = None
) -> Never:
    """Raises Invalid for a model that can never work here."""
    raise Invalid(FIELD, problem, remedy) from cause
