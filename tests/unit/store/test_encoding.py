"""What crosses into Postgres: log-probabilities, text that Postgres refuses, URLs. No server
needed."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.contract.job import TokenLogprob
from shardline.store.connection.encoding import (
    NO_PROBABILITY,
    dump,
    dump_logprobs,
    load_logprobs,
    storable,
    unstorable,
)

finite = st.floats(allow_nan=False, allow_infinity=False)
entries = st.lists(
    st.builds(
        TokenLogprob,
        st.integers(0, 99),
        finite,
        st.lists(st.tuples(st.integers(0, 99), finite)).map(tuple),
    )
)


@given(entries)
def test_stored_logprobs_read_back_the_same(logprobs: list[TokenLogprob]) -> None:
    document = json.loads(dump(dump_logprobs(logprobs)))
    assert load_logprobs(document) == tuple(logprobs)


def test_the_logprob_of_an_impossible_token_is_a_number_that_json_has() -> None:
    stored = dump_logprobs([TokenLogprob(1, -math.inf, ((2, math.nan),))])
    assert stored == [[1, NO_PROBABILITY, [[2, NO_PROBABILITY]]]]


def test_missing_logprobs_read_as_none() -> None:
    assert load_logprobs(None) is None


@given(st.text(st.characters()))
def test_postgres_can_hold_any_storable_text(text: str) -> None:
    assert not unstorable(storable(text))


@pytest.mark.parametrize(
    "value", ["a\0", "\ud800", {"a": ["\0"]}, {"\0": 1}, ({"deep": {"er": "\udfff"}},)]
)
def test_a_nul_or_a_surrogate_is_found_anywhere(value: object) -> None:
    assert unstorable(value)


@pytest.mark.parametrize("value", ["", "ä\n", "\\u0000", {"a": [1, None, 2.5, True]}, 7])
def test_any_other_value_is_storable(value: object) -> None:
    assert not unstorable(value)


def test_values_nested_without_end_are_refused() -> None:
    value: object = 1
    for _ in range(10_000):
        value = {"a": value}
    assert unstorable(value)
