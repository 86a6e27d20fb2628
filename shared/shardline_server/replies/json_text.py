"""JSON text from values, and values from JSON text that others may read differently."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from shardline_server.replies.json_scanner import MAX_DEPTH

BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)


class _RepeatedKey(Exception):
    """An object has a key twice."""


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def value_of(text: str) -> Any:
    """Returns the value of JSON text; ValueError if it is none, or nested too deep."""
    _check_depth(text)
    return json.loads(text, parse_constant=_refuse)


def _check_depth(text: str) -> None:
    """Raises ValueError beyond the scanner's limit: how deep Python reads depends on its
    caller."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = 0
    for found in BRACKETS.finditer(text):
        mark = found.group()
        depth += 1 if mark in "[{" else -1 if mark in "]}" else 0
        if depth > MAX_DEPTH:
            raise ValueError("nested too deep")


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
        value = json.loads(text)
    else:
        return text
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:  # a number too large for a float: it would become no JSON at all
        return text
    return text_of(value)
