"""Arguments that a model writes one by one, as the JSON object that clients read. The tool's schema
gives the types that the text does not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from shardline_server.replies.json_scanner import JsonScanner
from shardline_server.replies.json_text import text_of, value_of
from shardline_server.replies.python_literal import json_of_literal
from shardline_server.replies.reply_sink import ReplySink

MAX_SCHEMA_STEPS = 100
"""Parts of a schema that are read for the types of one argument: references may be circular."""

_INTEGER = re.compile(r"-?[0-9]+(\.0+)?")
_LITERALS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_ANY = frozenset({"object", "array", "integer", "number", "boolean", "null"})


class ArgumentWriter:
    """Writes the arguments of the call that has begun."""

    __slots__ = ("_parameters", "_sink", "_word")

    def __init__(self, sink: ReplySink, name: str) -> None:
        self._sink = sink
        self._parameters = sink.tools[name].schema
        self._word = "{"

    def add_json(self, key: str, value: str) -> None:
        """Appends an argument with JSON text as its value."""
        self._sink.arguments(f"{self._word}{text_of(key)}: {value}")
        self._word = ", "

    def add_string(self, key: str, text: str) -> None:
        """Appends an argument that is a string."""
        self.add_json(key, text_of(text))

    def add_typed(self, key: str, text: str) -> None:
        """Appends an argument of the first type of its schema that the text fits."""
        self.add_json(key, typed(text, types_of(self._parameters, key)))

    def add_value(self, key: str, text: str) -> None:
        """Appends an argument that the text declares as JSON; a string if it is none."""
        self.add_json(key, json_of(text.strip()) or text_of(text))

    def end(self) -> None:
        """Closes the object."""
        self._sink.arguments("}" if self._word == ", " else "{}")
        self._sink.end_call()


def json_of(text: str) -> str | None:
    """Returns the text if it is one JSON value, with line breaks in its strings escaped."""
    parts: list[str] = []
    scanner = JsonScanner(parts.append)
    end = scanner.scan(text, 0)
    is_read = end == len(text) and not scanner.is_broken
    return "".join(parts) if is_read and scanner.finish() else None


def types_of(parameters: dict[str, Any], key: str) -> frozenset[str]:
    """Returns the types of JSON that the schema allows for the argument; none if it is silent."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    return frozenset(_types_in(schema, parameters)) if isinstance(schema, dict) else frozenset()


def _types_in(schema: dict[str, Any], root: dict[str, Any]) -> Iterator[str]:
    waiting: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_STEPS):
        if not waiting:
            return
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        named = part.get("type")
        yield from [named] if isinstance(named, str) else _strings(named)
        for value in [part["const"]] if "const" in part else _items(part.get("enum")):
            if "type" not in part:
                yield _type_of(value)
        for word in ("anyOf", "oneOf", "allOf"):
            waiting += _items(part.get(word))
        waiting.append(_referred(part.get("$ref"), root))


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _strings(value: object) -> list[str]:
    return [item for item in _items(value) if isinstance(item, str)]


def _type_of(value: object) -> str:
    types = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return "null" if value is None else types.get(type(value), "object")


def _referred(reference: object, root: dict[str, Any]) -> object:
    """Returns the part of the schema that a reference inside it names."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: object = root
    for step in reference[2:].split("/"):
        found = found.get(step) if isinstance(found, dict) else None
    return found


def typed(text: str, types: frozenset[str]) -> str:
    """Returns the text as JSON of one of the types: as a string only if it fits no other one. With
    no types, as whatever JSON it is."""
    if types == {"string"}:
        return text_of(text)
    word = text.strip()
    literal = _LITERALS.get(word.lower())
    found = literal or json_of(word)
    if found is None and word[:1] in {"{", "["} and (not types or types & {"object", "array"}):
        found = json_of_literal(word)
    if found is not None:
        found_type = _type_of(value_of(found))
        if found_type in (types or _ANY) or (found_type == "integer" and "number" in types):
            return found
        if found_type == "number" and "integer" in types and _INTEGER.fullmatch(found):
            return found.partition(".")[0]
        if types and "string" not in types and found_type != "string":
            return found
    return text_of(text)
