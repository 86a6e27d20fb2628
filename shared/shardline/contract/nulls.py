"""Fields that are null in what clients send: the same as left out.

Clients send back messages as their own types hold them, with null for each field that a server left
out, among them fields that are newer than this code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIELDS = (
    *("messages", "system", "input", "tools", "tool_choice"),
    *("response_format", "thinking", "output_config"),
)
"""Fields of a request whose objects may hold such fields."""

CALLERS_OWN = frozenset({"input", "input_schema", "input_examples", "parameters", "schema"})
"""Names of objects that a caller makes up. A null in one means something."""

MAX_LEVELS = 8
"""Of lists and objects in each other: the deepest is a text in the result of a call."""


def without_nulls(value: Any, num_levels: int = MAX_LEVELS) -> Any:
    """Returns the same without what is null in its objects, `num_levels` deep."""
    if num_levels == 0:
        return value
    if isinstance(value, list | tuple):
        return [without_nulls(one, num_levels - 1) for one in value]
    if isinstance(value, Mapping):
        return {
            name: one if name in CALLERS_OWN else without_nulls(one, num_levels - 1)
            for name, one in value.items()
            if one is not None
        }
    return value
