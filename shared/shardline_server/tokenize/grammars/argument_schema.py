"""What the arguments of a forced tool call must be: an object of the named properties alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardline.contract.chat import FunctionDefinition
from shardline.contract.structured_output import lenient

COMBINING = frozenset({"allOf", "dependentSchemas", "if", "not", "oneOf", "unevaluatedProperties"})
"""Keywords by which one value obeys several schemas, or must not obey one: a schema that has one of
them anywhere stays as it is."""
COMBINING_BESIDE_PROPERTIES = frozenset({"$ref", "anyOf"})
NEEDING_MORE = frozenset({"additionalProperties", "minProperties", "patternProperties"})
"""Next to one of these, an object may need properties that are not named."""

MAX_LEVELS = 64
"""Below, a schema stays as it is."""
BY_NAME = ("properties", "$defs", "definitions")
"""Keywords that hold schemas by name."""


def arguments_schema(function: FunctionDefinition) -> dict[str, Any]:
    """Returns the JSON schema of a call's arguments, which are an object in any case.

    An object with named properties, and no rule for others, has no others: allowed any, a
    small model writes them without end. What this accepts, the tool's own schema accepts too, but
    for what no grammar holds, unless it is strict.
    """
    schema = {"type": "object", **(function.schema or {"properties": {}})}
    if not function.strict:
        schema = lenient(schema)
    return schema if any(_combines(part) for part in _parts(schema)) else _closed(schema)


def _combines(schema: Mapping[str, Any]) -> bool:
    return not COMBINING.isdisjoint(schema) or (
        "properties" in schema and not COMBINING_BESIDE_PROPERTIES.isdisjoint(schema)
    )


def _parts(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schema, and all objects in it."""
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            yield part
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


def _closed(schema: Any, level: int = 0) -> Any:
    if not isinstance(schema, Mapping) or level == MAX_LEVELS:
        return schema
    closed = dict(schema)
    for name in BY_NAME:
        if isinstance(children := closed.get(name), Mapping):
            closed[name] = {key: _closed(child, level + 1) for key, child in children.items()}
    for name in ("items", "additionalProperties"):
        if name in closed:
            closed[name] = _closed(closed[name], level + 1)
    for name in ("anyOf", "prefixItems"):
        if isinstance(members := closed.get(name), list):
            closed[name] = [_closed(member, level + 1) for member in members]
    return {**closed, "additionalProperties": False} if _names_all(closed) else closed


def _names_all(schema: Mapping[str, Any]) -> bool:
    """Whether its properties are all that an object of it needs."""
    properties = schema.get("properties")
    required = schema.get("required", [])
    return (
        isinstance(properties, Mapping)
        and NEEDING_MORE.isdisjoint(schema)
        and isinstance(required, list)
        and all(name in properties for name in required)
    )
