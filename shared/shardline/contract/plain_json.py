"""JSON of what callers pass as values: their texts may be of subclasses of str, and a field that is
null is one that is left out.

Clients send back messages as their own types hold them, with null for each field that a server left
out, among them fields that are newer than this code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

FIELDS = (
    *("messages", "system", "input", "tools", "tool_choice"),
    *("response_format", "thinking", "output_config", "depends_on"),
)
"""Fields of a request with objects that may hold such fields."""

CALLERS_OWN = frozenset(
    {"input", "input_schema", "input_examples", "parameters", "schema", "value"}
)
"""Names of objects that a caller makes up. A null in one means something."""

MAX_LEVELS = 9
"""Of lists and objects in each other: the deepest is a text of a document in the result of a
call."""


def encode_json(document: object) -> bytes:
    """Encodes as UTF-8. Raises TypeError for what JSON does not know, UnicodeEncodeError for a lone
    surrogate."""
    return msgspec.json.encode(document, enc_hook=_text)


def builtins(document: object) -> Any:
    """Returns dicts, lists and values of Python. Raises TypeError for what JSON does not know."""
    return msgspec.to_builtins(document, enc_hook=_text)


def _text(value: object) -> str:
    """The text of an instance of a subclass of str, such as Django's SafeString or numpy's str_."""
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(f"{type(value).__name__} is nothing that JSON knows")


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
