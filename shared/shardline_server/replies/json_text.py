"""JSON text from values, and values from JSON text that others may read differently."""

from __future__ import annotations

import json
from typing import Any, NoReturn


class _RepeatedKey(Exception):
    """An object has a key twice."""


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def value_of(text: str) -> Any:
    """Returns the value of JSON text; ValueError if it is none."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deep") from None


def text_of(value: Any) -> str:
    """Returns the value as JSON text that UTF-8 can carry: half a surrogate pair stays escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or _is_encodable(text) else json.dumps(value)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _object_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _RepeatedKey
    return found


def without_repeated_keys(text: str) -> str:
    """Returns the JSON text itself, or with the last value alone of each key that an object
    repeats: clients disagree on such text."""
    try:
        json.loads(text, object_pairs_hook=_object_of)
    except _RepeatedKey:
        return text_of(json.loads(text))
    return text
