"""What Postgres holds and Python does not is read all the same, and fails the checks of whoever
needs another value."""

from __future__ import annotations

import msgspec
import pytest

from shardline.contract.job import SamplingParams
from shardline.contract.request_parsing import parse_params
from shardline.store.connection.decoding import load_json

MANY = "1" * 5_001


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (f'{{"a": {MANY}}}', {"a": MANY}),
        (f'{{"a": [-{MANY}]}}', {"a": [f"-{MANY}"]}),
        ('{"a": 1.5, "b": 3, "c": null}', {"a": 1.5, "b": 3, "c": None}),
        (b'["b"]', ["b"]),
    ],
    ids=["digits", "negative digits", "plain", "bytes"],
)
def test_a_number_that_python_has_not_is_its_text(text: str | bytes, value: object) -> None:
    assert load_json(text) == value
    msgspec.json.encode(load_json(text))


@pytest.mark.parametrize("depth", [900, 5_000, 100_000])
def test_what_is_nested_too_deep_to_be_read_is_its_text_and_can_be_shown(depth: int) -> None:
    text = "[" * depth + "]" * depth
    found = load_json(text)
    assert found == text or isinstance(found, list)


@pytest.mark.parametrize(
    "text",
    [
        f'{{"max_tokens": {MANY}}}',
        f'{{"temperature": {MANY}}}',
        '{"top_p": 1e400}',
        f'{{"a": {MANY}}}',
        "[" * 9_999 + "]" * 9_999,
    ],
    ids=["max_tokens", "temperature", "top_p", "unknown", "nested"],
)
def test_such_parameters_fail_their_check_and_nothing_else(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        parse_params(load_json(text))


def test_a_row_may_hold_nulls_and_whole_numbers_with_a_point() -> None:
    assert parse_params({"max_tokens": 5.0, "temperature": None}) == SamplingParams(max_tokens=5)
