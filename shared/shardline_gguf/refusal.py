"""Refuses a GGUF file with a remedy. Knows no rule by which it is refused."""

from __future__ import annotations

from typing import Never

from shardline.base.errors import Invalid

FIELD = "SHARDLINE_MODEL"
COPY_AGAIN = "Copy the file again, or give the model in safetensors"


def refuse(problem: str, remedy: str = COPY_AGAIN, cause: Exception | None = None) -> Never:
    """Raises Invalid for a file that can never work here."""
    raise Invalid(FIELD, problem, remedy) from cause
