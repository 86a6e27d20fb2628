"""Arguments of a forced call: only what the tool names, and never what its schema refuses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema_rs import is_valid

from shardline.contract.chat import FunctionDefinition
from shardline_server.tokenize.grammars.argument_schema import arguments_schema

NUMBER = {"type": "integer"}
POINT = {"type": "object", "properties": {"x": NUMBER}}


def closed(schema: dict[str, Any] | None, *, strict: bool = True) -> dict[str, Any]:
    return arguments_schema(FunctionDefinition(name="tool", parameters=schema, strict=strict))


def test_what_no_grammar_holds_does_not_count_unless_the_tool_is_strict() -> None:
    assert closed(POINT, strict=False) == {**closed(POINT), "x-guidance": {"lenient": True}}


def test_a_tool_without_parameters_takes_none() -> None:
    for schema in (None, {}, {"type": "object", "properties": {}}):
        assert is_valid(closed(schema), {})
        assert not is_valid(closed(schema), {"tool": 1})


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"point": POINT}},
        {"properties": {"point": {"anyOf": [POINT, {"type": "null"}]}}},
        {"properties": {"point": {"$ref": "#/$defs/Point"}}, "$defs": {"Point": POINT}},
    ],
)
def test_objects_in_a_tools_arguments_have_the_named_properties_alone(
    schema: dict[str, Any],
) -> None:
    assert is_valid(closed(schema), {"point": {"x": 1}})
    assert not is_valid(closed(schema), {"point": {"x": 1}, "more": 1})
    assert not is_valid(closed(schema), {"point": {"x": 1, "more": 1}})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {"x": NUMBER}, "additionalProperties": True},
        {"type": "object", "properties": {"x": NUMBER}, "patternProperties": {"^y": NUMBER}},
        {"type": "object", "properties": {"x": NUMBER}, "minProperties": 2},
        {"type": "object", "properties": {"x": NUMBER}, "required": ["y"]},
        {"type": "object", "allOf": [POINT, {"properties": {"y": NUMBER}}]},
        {"type": "object", "properties": {"x": NUMBER}, "anyOf": [{"required": ["y"]}]},
    ],
)
def test_what_needs_other_properties_may_have_them(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema
    assert is_valid(closed(schema), {"x": 1, "y": 2})


def test_a_schema_of_any_depth_is_read() -> None:
    schema: dict[str, Any] = POINT
    for _ in range(20_000):
        schema = {"items": schema}
    assert closed({"properties": {"deep": schema}})["additionalProperties"] is False


SCALARS = st.one_of(st.integers(0, 1), st.sampled_from(["a", "b"]), st.none())
NAMES = st.sampled_from(["a", "b", "c"])
VALUES = st.recursive(
    SCALARS,
    lambda values: st.lists(values, max_size=2) | st.dictionaries(NAMES, values),
    max_leaves=4,
)
LEAVES = st.sampled_from([{}, {"type": "integer"}, {"type": "string"}, {"$ref": "#/$defs/a"}])


def objects(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas that hold others in every place that a keyword of JSON Schema has."""
    several = st.lists(schemas, min_size=1, max_size=2)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "array"]),
            "properties": st.dictionaries(NAMES, schemas, max_size=2),
            "required": st.lists(NAMES, max_size=2, unique=True),
            "items": schemas,
            "additionalProperties": schemas,
            "minProperties": st.integers(0, 2),
            "anyOf": several,
            "oneOf": several,
            "allOf": several,
            "not": schemas,
            "contains": schemas,
        },
    )


SCHEMAS = st.recursive(LEAVES, objects, max_leaves=6)


@given(
    schema=objects(SCHEMAS),
    definition=SCHEMAS,
    values=st.lists(st.dictionaries(NAMES, VALUES, max_size=3), min_size=1, max_size=8),
)
def test_no_schema_accepts_more_than_the_tools_own(
    schema: dict[str, Any], definition: dict[str, Any], values: list[dict[str, Any]]
) -> None:
    own = {**schema, "$defs": {"a": definition}}
    for value in values:
        assert not is_valid(closed(own), value) or is_valid({"type": "object", **own}, value)
