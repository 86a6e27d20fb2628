"""Schemas that pydantic and zod write, as grammars hold them."""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema_rs import is_valid
from pydantic import UUID4, Base64Bytes, Field, SecretStr, TypeAdapter

from shardline.base.errors import Invalid
from shardline.contract.chat import FunctionDefinition, Tool
from shardline.contract.structured_output import StructuredOutput, lenient
from shardline.contract.tool_choice import CallableTools
from shardline_server.tokenize.grammars.grammar import GrammarMatcher, Grammars
from shardline_server.tokenize.grammars.grammar_judge import Question
from shardline_server.tokenize.grammars.grammar_trial import GrammarTrial
from shardline_server.tokenize.grammars.json_schema import PATTERNS, readable
from shardline_server.tokenize.grammars.reply_grammar import ReplyGrammar, Thinking
from tests.unit.tokenize.small_tokenizers import END, byte_level, id_of

TOKENIZER = byte_level()
END_ID = id_of(TOKENIZER, END)
GRAMMARS = Grammars(TOKENIZER.to_str(), vocab_size=END_ID + 1, eos_ids=(END_ID,))
TRIAL = GrammarTrial()

(ZOD_EMAIL,) = PATTERNS
EMAIL = {"type": "string", "format": "email", "pattern": ZOD_EMAIL}
DURATION = {
    "type": "string",
    "format": "duration",
    "pattern": (
        r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
        r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
    ),
}
HOSTNAME = {
    "type": "string",
    "format": "hostname",
    "pattern": r"^(?=.{1,253}\.?$)[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(\.[a-zA-Z0-9]+)*$",
}
ID = "6f8e2c1a-7d1b-4e2f-9a3c-0123456789ab"


class Color(Enum):
    """Names of properties."""

    RED = "red"
    BLUE = "blue"


def holds(schema: dict[str, Any], value: object) -> bool:
    """Whether the value's JSON may be a completion."""
    return may_be(StructuredOutput(json=schema), json.dumps(value, ensure_ascii=False))


def may_be(output: StructuredOutput, text: str) -> bool:
    """Whether this may be a completion."""
    matcher = GRAMMARS.matcher(output)
    for token_id in TOKENIZER.encode(text, add_special_tokens=False).ids:
        if not matcher.allows(token_id):
            return False
        matcher.take([token_id])
    return ends(matcher)


def ends(matcher: GrammarMatcher) -> bool:
    """Whether the completion may end here."""
    return bool(int.from_bytes(matcher.allowed(), "little") >> END_ID & 1)


def of_type(kind: Any) -> dict[str, Any]:
    return TypeAdapter(kind).json_schema()


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (of_type(dict[Color, int]), {"red": 1, "blue": 2}, {"green": 1}),
        (of_type(dict[Literal["a", "b"], int]), {"b": 1}, {"c": 1}),
        (of_type(dict[UUID, int]), {ID: 1}, {"me": 1}),
        (of_type(dict[Annotated[str, Field(min_length=2)], int]), {"ab": 1}, {"a": 1}),
        ({"type": "object", "propertyNames": {"maxLength": 1}}, {"é": 1}, {"ab": 1}),
        ({"type": "object", "propertyNames": {"pattern": "^[a-z]$"}}, {"b": None}, {"bb": None}),
        ({"type": "object", "propertyNames": {"const": "a"}}, {"a": [1]}, {"b": [1]}),
        (
            {
                "type": "object",
                "propertyNames": {"type": "string"},
                "additionalProperties": {"type": "number"},
            },
            {"any": 1.5},
            {"any": "1.5"},
        ),
        (of_type(UUID4), ID, ID.replace("-4e2f", "-1e2f")),
        (of_type(UUID4), ID.upper(), ID.replace("-9a3c", "-7a3c")),
        (of_type(Base64Bytes), "YWI=", "YWI"),
        (of_type(SecretStr), "anything", 1),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, [1], [1, 2]),
        ({"type": "array", "uniqueItems": False}, [1, 1], {}),
        (EMAIL, "ann.lee@example.org", "ann..lee@example.org"),
        (DURATION, "P1DT2H", "P1H"),
        (HOSTNAME, "a.example.org", "a..org"),
        ({"properties": {"a": {"items": EMAIL}}}, {"a": ["a@b.de"]}, {"a": [".a@b.de"]}),
        (of_type(dict[str, Base64Bytes]), {"x": "YWI="}, {"x": "?"}),
        (of_type(tuple[UUID4, int]), [ID, 1], ["", 1]),
    ],
)
def test_what_pydantic_and_zod_write_is_held(
    schema: dict[str, Any], good: object, bad: object
) -> None:
    assert holds(schema, good)
    assert not holds(schema, bad)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"format": {"type": "string"}, "pattern": {}}},
        {"enum": [{"uniqueItems": False, "format": "path"}]},
        {"type": "string", "format": "date-time"},
        {"type": "object", "propertyNames": {"enum": ["a"]}, "properties": {"b": {}}},
        {"type": "object", "propertyNames": {"pattern": "a", "maxLength": 9}},
        {"type": "object", "propertyNames": {"format": "date"}},
        {"type": "object", "propertyNames": {"$ref": "#/$defs/none"}},
        {"type": "array", "uniqueItems": True, "maxItems": 2},
        {"type": "string", "pattern": "^(?!a)b"},
        {"type": "string", "pattern": "^(?!a)b", "format": "unknown"},
        {"type": "string", "format": 5, "pattern": None},
        {"type": "string", "format": "regex"},
    ],
)
def test_what_needs_no_other_words_or_has_none_stays(schema: dict[str, Any]) -> None:
    assert readable(schema) == readable(json.dumps(schema)) == schema


def test_texts_that_are_no_schema_stay() -> None:
    for text in ('{"format":', '"format"', '["format"]', '{"items":' * 3000 + '"format"'):
        assert readable(text) == text


@pytest.mark.parametrize(
    "schema",
    [
        of_type(set[str]),
        {"type": "object", "properties": {"a": {"not": {"type": "string"}}}},
        {"type": "string", "pattern": "^(?!a)b"},
        {"type": "string", "pattern": "^(?!a)b", "format": "path"},
        {"type": "object", "propertyNames": {"format": "date"}},
        {"type": "string", "format": "regex"},
    ],
)
def test_what_no_grammar_holds_is_refused_unless_the_schema_is_lenient(
    schema: dict[str, Any],
) -> None:
    TRIAL.check(Question(output=StructuredOutput(json=lenient(schema))))
    with pytest.raises(Invalid):
        TRIAL.check(Question(output=StructuredOutput(json=schema)))


def test_a_call_is_held_to_what_a_grammar_holds_of_its_tools_schema() -> None:
    properties = {
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "votes": {"type": "object", "propertyNames": {"enum": ["yes"]}},
    }
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    tool = Tool(function=FunctionDefinition(name="vote", parameters=schema))
    output = ReplyGrammar({}).of(
        family="hermes",
        called=CallableTools(tools=(tool,), is_required=True, is_single=True),
        answer=None,
        thinking=Thinking(is_open=False, may_begin=False),
    )
    assert output is not None
    call = '<tool_call>\n{"name": "vote", "arguments": {"tags": ["a", "a"], "votes": {"%s": 1}}}'
    for name, is_held in (("yes", True), ("no", False)):
        text = f"{call % name}\n</tool_call>"
        assert may_be(output, text) is is_held


def test_a_lenient_schema_keeps_its_own_guidance() -> None:
    schema = lenient({"x-guidance": {"item_separator": ","}, "uniqueItems": True})
    matcher = GRAMMARS.matcher(StructuredOutput(json=schema))

    matcher.take(TOKENIZER.encode("[1,1]", add_special_tokens=False).ids)
    assert ends(matcher)


@given(text=st.text("aZ0._'+-@", max_size=14), end=st.sampled_from(["", "@a.bc", "@a-.b.cd"]))
def test_an_email_address_is_what_zods_pattern_matches(text: str, end: str) -> None:
    ours = PATTERNS[ZOD_EMAIL]
    assert bool(re.search(ours, text + end)) is bool(re.search(ZOD_EMAIL, text + end))


NAMES = st.sampled_from(["a", "b", "ab"])
SIMPLE: st.SearchStrategy[Any] = st.one_of(
    st.booleans(),
    st.builds(dict),
    st.fixed_dictionaries({"type": st.sampled_from(["string", "integer", "array"])}),
    st.fixed_dictionaries({"uniqueItems": st.booleans(), "maxItems": st.integers(0, 2)}),
    st.fixed_dictionaries({"format": st.just("password"), "maxLength": st.integers(0, 1)}),
)
RULES = st.one_of(
    SIMPLE,
    st.fixed_dictionaries(
        {"enum": st.lists(NAMES | st.integers(0, 1), max_size=2)},
        optional={"maxLength": st.just(1), "type": st.sampled_from(["string", "integer"])},
    ),
    st.fixed_dictionaries({"const": NAMES | st.none()}),
    st.fixed_dictionaries({"pattern": st.sampled_from(["^a", "b"])}),
    st.fixed_dictionaries({"minLength": st.integers(0, 2)}),
    st.just({"$ref": "#/$defs/name"}),
)
VALUES = st.recursive(
    st.one_of(st.integers(0, 2), NAMES),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(NAMES, values, max_size=3),
    max_leaves=5,
)


@given(
    schema=st.fixed_dictionaries(
        {"propertyNames": RULES},
        optional={
            "additionalProperties": SIMPLE,
            "properties": st.dictionaries(NAMES, SIMPLE, max_size=2),
            "required": st.lists(NAMES, max_size=1),
        },
    ),
    values=st.lists(VALUES, min_size=1, max_size=8),
)
def test_a_rewritten_schema_accepts_what_the_first_one_accepts(
    schema: dict[str, Any], values: list[object]
) -> None:
    whole = {"$defs": {"name": {"enum": ["a", "ab"]}}, "items": schema, "anyOf": [schema, {}]}
    for value in values:
        rewritten = readable(whole)
        assert isinstance(rewritten, dict)
        assert is_valid(rewritten, [value]) is is_valid(whole, [value])


KEYWORDS = [
    *("$defs", "$ref", "additionalProperties", "anyOf", "const", "enum", "format", "items"),
    *("lenient", "maxItems", "minLength", "pattern", "patternProperties", "properties"),
    *("propertyNames", "uniqueItems", "x-guidance"),
]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["a", "string", "#/a"]),
    lambda values: (
        st.lists(values, max_size=2)
        | st.dictionaries(
            st.sampled_from(KEYWORDS),
            values,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(document=ANYTHING)
def test_no_document_is_too_odd_to_be_read(document: Any) -> None:
    readable(json.dumps(document))
