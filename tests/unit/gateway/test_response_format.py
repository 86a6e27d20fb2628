"""What the text of an answer must be, in OpenAI's two forms and Anthropic's: nothing of it is
left out unsaid."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from services.gateway.anthropic.requests import message_request
from services.gateway.openai.requests import chat_request
from services.gateway.responses.requests import field_names, response_request
from shardline.base.errors import Invalid
from shardline.contract.structured_output import (
    MAX_GRAMMAR_BYTES,
    StructuredOutput,
    closed,
    lenient,
)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOSED = {**SCHEMA, "additionalProperties": False}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}


def of_chat(form: dict[str, Any]) -> StructuredOutput | None:
    return chat_request({**CHAT, "response_format": form}).params().structured_outputs


def of_response(form: dict[str, Any]) -> StructuredOutput | None:
    asked = {"model": "m", "input": "a", "text": {"format": form}}
    return response_request(asked).structured_outputs


def of_message(form: dict[str, Any]) -> StructuredOutput | None:
    asked = {**CHAT, "max_tokens": 8, "output_config": {"format": form}}
    return message_request(asked).structured_outputs


@pytest.mark.parametrize("read", [of_chat, of_response])
def test_a_json_object_is_held_to_its_schema_if_that_says_something(read: Any) -> None:
    output = read({"type": "json_object", "schema": SCHEMA})
    assert json.loads(output.json) == CLOSED
    silent: list[dict[str, Any]] = [{}, {"schema": {}}, {"schema": None}]
    for more in silent:
        assert read({"type": "json_object", **more}) == StructuredOutput(json_object=True)


@pytest.mark.parametrize(
    ("strict", "expected"), [(True, CLOSED), (False, lenient(CLOSED)), (None, lenient(CLOSED))]
)
def test_a_schema_is_lenient_unless_it_is_strict(
    strict: bool | None, expected: dict[str, Any]
) -> None:
    named = {"name": "a", "schema": SCHEMA, "strict": strict}
    for output in (
        of_chat({"type": "json_schema", "json_schema": named}),
        of_response({"type": "json_schema", **named}),
    ):
        assert output is not None
        assert json.loads(str(output.json)) == expected


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "array", "items": SCHEMA}, {"type": "array", "items": CLOSED}),
        ({**SCHEMA, "additionalProperties": True}, {**SCHEMA, "additionalProperties": True}),
        ({**SCHEMA, "patternProperties": {}}, {**SCHEMA, "patternProperties": {}}),
        ({"allOf": [SCHEMA]}, {"allOf": [SCHEMA]}),
        ({"type": "object"}, {"type": "object"}),
    ],
)
def test_an_object_has_the_named_properties_alone_unless_it_says_more(
    schema: dict[str, Any], expected: dict[str, Any]
) -> None:
    named = {"name": "a", "schema": schema, "strict": True}
    for output in (
        of_chat({"type": "json_schema", "json_schema": named}),
        of_response({"type": "json_schema", **named}),
        of_message({"type": "json_schema", "schema": schema}),
    ):
        assert output is not None
        assert json.loads(str(output.json)) == expected
    own = chat_request({**CHAT, "structured_outputs": {"json": schema}}).structured_outputs
    assert own is not None
    assert json.loads(str(own.json)) == schema


def test_a_schema_of_too_many_parts_stays_as_it_is() -> None:
    large = {**SCHEMA, "examples": [0] * MAX_GRAMMAR_BYTES}
    assert closed(large) == large
    assert closed(SCHEMA) == CLOSED


@pytest.mark.parametrize(
    "form",
    [
        {"type": "text", "schema": SCHEMA},
        {"type": "json_object", "json_schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}, "strict": True},
    ],
)
def test_a_field_that_means_nothing_in_a_format_is_refused_by_name(form: dict[str, Any]) -> None:
    with pytest.raises(Invalid) as caught:
        of_chat(form)
    assert caught.value.field == f"response_format.{[*form][-1]}"
    with pytest.raises(Invalid) as caught:
        of_response(form)
    assert caught.value.field.startswith("text.format")


def test_a_schema_has_hugging_faces_name_too() -> None:
    for more in ({"value": SCHEMA}, {"value": SCHEMA, "schema": SCHEMA}):
        output = of_chat({"type": "json_object", **more})
        assert output == of_chat({"type": "json_object", "schema": SCHEMA})
    null = {"const": None}
    output = of_chat({"type": "json_object", "value": null})
    assert output is not None
    assert json.loads(str(output.json)) == null
    for more in ({"value": SCHEMA, "schema": {}}, {"value": {}, "schema": SCHEMA}):
        with pytest.raises(Invalid, match="send one of the two") as caught:
            of_chat({"type": "json_object", **more})
        assert caught.value.field == "response_format"


def test_a_wrong_schema_of_a_json_object_is_named_where_it_stands() -> None:
    for name in ("schema", "value"):
        form = {"type": "json_object", name: SCHEMA}
        names = chat_request({**CHAT, "response_format": form}).field_names
        assert names["structured_outputs.json"] == f"response_format.{name}"


def test_a_response_shows_its_format_as_it_came() -> None:
    for form in ({"type": "json_object"}, {"type": "json_object", "schema": SCHEMA}):
        asked = response_request({"model": "m", "input": "a", "text": {"format": form}}).asked
        assert msgspec.to_builtins(asked.options())["text"]["format"] == form
        assert field_names(asked)["structured_outputs.json"] == "text.format.schema"
