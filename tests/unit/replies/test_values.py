"""JSON and Python's literals in pieces, beside the readers of the standard library."""

from __future__ import annotations

import ast
import json
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.contract.chat import FunctionDefinition, Tool
from shardline_server.replies import parse
from shardline_server.replies.argument_writer import json_of
from shardline_server.replies.json_scanner import MAX_DEPTH, JsonScanner
from shardline_server.replies.json_text import text_of, without_repeated_keys
from shardline_server.replies.python_literal import json_of_literal

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(value=values, indent=st.sampled_from([None, 1]), is_ascii=st.booleans())
def test_json_is_taken_as_it_stands(value: object, indent: int | None, is_ascii: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)

    assert json_of(text) == text


@given(text=st.text(alphabet='{}[],:"\\ntrue-+.e019u \n', max_size=12))
def test_what_the_scanner_takes_is_json(text: str) -> None:
    found = json_of(text.strip())

    try:
        value = json.loads(text, strict=False)
    except ValueError:
        assert found is None
    else:
        assert found is not None
        assert json.loads(found) == value


@given(value=values, rest=st.text(max_size=5), cut=st.integers(0, 40))
def test_the_scanner_stops_where_the_value_ends(value: object, rest: str, cut: int) -> None:
    text = json.dumps([value])
    parts: list[str] = []
    scanner = JsonScanner(parts.append)

    first = scanner.scan(text[:cut], 0)
    last = 0 if scanner.is_done else scanner.scan(text[cut:] + rest, 0)

    assert first + last == len(text)
    assert "".join(parts) == text
    assert scanner.is_done


def test_deep_json_is_refused() -> None:
    assert json_of("[" * MAX_DEPTH + "]" * MAX_DEPTH) is not None
    assert json_of("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)) is None


@given(value=values)
def test_literals_of_python_become_json(value: object) -> None:
    text = repr(value)
    found = json_of_literal(f"[{text}]")

    assert found is not None
    assert json.loads(found) == [ast.literal_eval(text)]


def test_half_a_pair_of_surrogates_stays_escaped() -> None:
    assert text_of("\ud800é") == '"\\ud800\\u00e9"'
    assert text_of("é") == '"é"'


@pytest.mark.parametrize("depth", [100, 975, 100_000])
def test_arguments_nested_in_a_string_are_content_or_a_call_and_never_an_error(depth: int) -> None:
    nested = "[" * depth + "]" * depth
    arguments = json.dumps(f'{{"a": {nested}}}')
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    tool = Tool(function=FunctionDefinition(name="f"))
    reply = parse(text, "hermes", job_id=UUID(int=0), tools=(tool,))
    assert bool(reply.tool_calls) == (depth < MAX_DEPTH)
    assert bool(reply.content) == (depth > MAX_DEPTH)


def test_a_repeated_key_beside_a_number_beyond_floats_stays_json() -> None:
    assert without_repeated_keys('{"a": 1, "a": 1e999}') == '{"a": 1, "a": 1e999}'
    assert without_repeated_keys('{"a": 1, "a": 2}') == '{"a": 2}'
