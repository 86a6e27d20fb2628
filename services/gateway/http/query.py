"""Queries of routes that read them themselves: known names only, each once; and ids in paths. Knows
no parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeVar
from uuid import UUID

import msgspec
from fastapi import Request

from shardline.base.errors import Invalid, NotFound
from shardline.contract.ids import parse_id
from shardline.contract.request_parsing import invalid_from

QueryT = TypeVar("QueryT", bound=msgspec.Struct)

MAX_DIGITS = 12
"""Of a number, without zeros before it: more are over every limit."""


@cache
def described(kind: type[msgspec.Struct]) -> Mapping[str, Mapping[str, Any]]:
    """Returns the JSON schema of each parameter: one that is there has a value, so none is null."""
    _, schemas = msgspec.json.schema_components((kind,), ref_template="{name}")
    found = {}
    for name, schema in schemas[kind.__name__]["properties"].items():
        one = next(one for one in schema.get("anyOf", [schema]) if one.get("type") != "null")
        found[name] = schemas.get(one.get("$ref"), one)
    return found


def path_id(text: str, prefix: str) -> UUID:
    """Reads the id in a path, with its prefix or without. Raises NotFound where nothing can have
    it: clients take that for an answer."""
    try:
        return parse_id(text.removeprefix(prefix))
    except Invalid as error:
        raise NotFound(f"nothing has the id {text[:64]!r}") from error


def query(request: Request, kind: type[QueryT]) -> QueryT:
    """The query as its type, which has a default for each name. A misspelled filter would be
    ignored without a word. Raises Invalid, naming the parameter."""
    return query_of(request.query_params.multi_items(), kind)


def query_of(items: Iterable[tuple[str, str]], kind: type[QueryT]) -> QueryT:
    """Reads the names and values of a query as `query` does."""
    schemas = described(kind)
    found: dict[str, Any] = {}
    for name, text in items:
        if name not in schemas:
            names = ", ".join(schemas)
            raise Invalid(name[:32], "there is no such query parameter", f"Use one of: {names}")
        # Clients repeat a list's name.
        if name in found and not name.endswith("[]"):
            raise Invalid(name, "it is given twice", "Send it once")
        if "\0" in text:
            raise Invalid(name, "it holds a NUL character", "Leave it out")
        is_number = "maximum" in schemas[name] and text.isascii() and text.isdecimal()
        found[name] = int(text.lstrip("0")[:MAX_DIGITS] or "0") if is_number else text
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        name = invalid_from(error).field
        problem = f"{str(found[name])[:32]!r} is not allowed"
        raise Invalid(name, problem, _remedy(schemas[name])) from error


def _remedy(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return f"Use one of: {' | '.join(schema['enum'])}"
    if "maximum" in schema:
        return f"Send a number from {schema['minimum']} to {schema['maximum']}, or leave it out"
    length = f"{schema.get('minLength', 0)} to {schema.get('maxLength', 'any number of')}"
    form = f" that match {schema['pattern']}" if "pattern" in schema else ""
    return f"Send {length} characters{form}, or leave it out"
