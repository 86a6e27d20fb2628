"""Random JSON schemas of the kinds that people send, each a function of its seed. Their texts are
short: strings, digits, arrays and objects are bounded, and a recursion may end at each level."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("name", "age", "größe", "名前", "is ok?", "total_eur", 'a"b', "émoji 🐱", "x", "tags")
TEXTS = ("red", "green", "né", "日本", "a b", "", "🐶", "N/A")
PATTERNS = (r"^[a-z]{2,6}$", r"^\d{3}-\d{2}$", r"^(foo|bar)+$", r"^[A-Z][a-z]{1,8}( [A-Z])?$")
FORMATS = {"date": 10, "time": 14, "date-time": 25, "email": 24, "uuid": 36, "ipv4": 15}
"""With a length that leaves room: some have no limit of their own."""
MAX_DEPTH = 3


def random_schema(seed: int) -> dict[str, Any]:
    """Returns an object's schema; every fifth one has a recursive part."""
    source = random.Random(seed)
    schema = _object(source, 0)
    if seed % 5 == 0:
        children = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1}
        node = {
            "type": "object",
            "properties": {"value": _leaf(source), "children": children},
            "required": ["value"],
            "additionalProperties": False,
        }
        schema["$defs"] = {"node": node}
        schema["properties"]["tree"] = {"$ref": "#/$defs/node"}
        schema["required"] = [*schema["required"], "tree"]
    return schema


def _any(source: random.Random, depth: int) -> dict[str, Any]:
    if depth >= MAX_DEPTH:
        return _leaf(source)
    make = source.choice((_object, _array, _either, _one_leaf, _one_leaf, _one_leaf))
    return make(source, depth + 1)


def _one_leaf(source: random.Random, _depth: int) -> dict[str, Any]:
    return _leaf(source)


def _object(source: random.Random, depth: int) -> dict[str, Any]:
    names = source.sample(NAMES, source.randint(1, 4))
    schema = {
        "type": "object",
        "properties": {name: _any(source, depth + 1) for name in names},
        "required": source.sample(names, source.randint(0, len(names))),
        "additionalProperties": False,
    }
    if source.random() < 0.1:
        schema["patternProperties"] = {r"^\d{1,3}$": {"type": "boolean"}}
        # Without a limit they may never end; one needs all others to be there.
        schema["required"] = names
        schema["maxProperties"] = len(names) + 2
    return schema


def _array(source: random.Random, depth: int) -> dict[str, Any]:
    least = source.randint(0, 2)
    items = _any(source, depth + 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}


def _either(source: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(source, depth + 1) for _ in range(source.randint(2, 3))]}


def _leaf(source: random.Random) -> dict[str, Any]:
    low = source.randint(-1000, 1000)
    high = low + source.randint(0, 5000)
    length = source.randint(0, 6)
    kind = source.choice(list(FORMATS))
    return source.choice(
        (
            {"type": "integer", "minimum": low, "maximum": high},
            {"type": "integer", "exclusiveMinimum": low, "maximum": high + 1},
            {"type": "number", "minimum": low, "maximum": high, "multipleOf": 0.01},
            {"type": "string", "minLength": length, "maxLength": length + source.randint(0, 12)},
            {"type": "string", "pattern": source.choice(PATTERNS), "maxLength": 12},
            {"type": "string", "format": kind, "maxLength": FORMATS[kind]},
            {"enum": source.sample(TEXTS, source.randint(1, 4))},
            {"enum": [1, 2.5, None, "three", True]},
            {"const": source.choice(TEXTS)},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
        )
    )
