"""How requests become rows, before any statement: order, chunks, tokens given by a door. No server
needed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardline.base.errors import Invalid
from shardline.contract.chat import Message
from shardline.contract.ids import new_id
from shardline.contract.job import JobRequest
from shardline.store.inserts import (
    MAX_BYTES,
    MAX_ROWS,
    EncodedRequest,
    _chunks,
    _row,
    encode_request,
)


def row(**fields: Any) -> EncodedRequest:
    """Of a request with these fields."""
    return encode_request(JobRequest(**{"model": "m", "prompt": "text", **fields}))


def test_many_small_rows_fill_each_statement() -> None:
    chunks = list(_chunks([row() for _ in range(2 * MAX_ROWS + 1)]))
    assert [len(numbers) for numbers, _ in chunks] == [MAX_ROWS, MAX_ROWS, 1]
    assert sorted(number for numbers, _ in chunks for number in numbers) == list(
        range(2 * MAX_ROWS + 1)
    )


@pytest.mark.parametrize("field", ["prompt", "messages", "metadata"])
def test_chunks_of_large_rows_have_a_bounded_size_and_leave_none_out(field: str) -> None:
    def large(key: str, chars: int) -> EncodedRequest:
        text = "x" * chars
        value: Any = {
            "prompt": text,
            "messages": (Message(role="user", content=text),),
            "metadata": {"a": text},
        }[field]
        return row(idempotency_key=key, **{"prompt": None, field: value})

    chunks = list(
        _chunks([*(large(key, MAX_BYTES // 2 - 1000) for key in "abc"), large("d", MAX_BYTES + 1)])
    )
    assert [numbers for numbers, _ in chunks] == [[0, 1], [2], [3]]
    assert list(_chunks([])) == []


def test_rows_in_any_order_are_sorted_by_keys_and_then_ids() -> None:
    ids = sorted(new_id() for _ in range(3))
    keyed = [row(idempotency_key=key) for key in ("b", "a", "c")]
    ((numbers, encoded),) = _chunks([*keyed, *(row(id=job_id) for job_id in reversed(ids))])
    assert numbers == [5, 4, 3, 1, 0, 2]
    assert [one["number"] for one in json.loads(encoded)] == numbers


def test_a_row_keeps_the_tokens_and_the_text_of_its_door() -> None:
    row = _row(JobRequest(model="m", prompt="text", max_tokens=9), ((1, 2), 7))
    assert (row["prompt"], row["prompt_ids"], row["max_tokens"], row["params"]) == (
        "text",
        (1, 2),
        7,
        {"max_tokens": 9},
    )


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_a_number_that_json_has_not_names_its_field(number: float) -> None:
    with pytest.raises(Invalid, match="which JSON has not") as caught:
        row(metadata={"deep": [{"score": number}]})
    assert caught.value.field == "metadata.deep[0].score"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"stop": ("a", "b\0")}, "stop[1]"),
        ({"messages": (Message("user", "a"), Message("user", "\ud800"))}, "messages[1].content"),
        ({"metadata": {"a": {"b\0": 1}}}, "metadata.a"),
        ({"tenant": "a\0"}, "tenant"),
    ],
)
def test_a_text_that_postgres_has_not_names_its_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(Invalid, match="NUL character or a lone surrogate") as caught:
        row(**fields)
    assert caught.value.field == field
