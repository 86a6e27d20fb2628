"""How requests become rows, before any statement: chunks, tokens given by a door. No server needed."""

from __future__ import annotations

from shardline.job import JobRequest
from shardline.store.inserts import MAX_CHARS, MAX_ROWS, _chunks, _row


def rows(num: int, chars: int = 4) -> list[dict[str, object]]:
    """Rows with a prompt of so many characters."""
    return [_row(JobRequest(model="m", prompt="x" * chars), None) for _ in range(num)]


def test_given_many_small_rows_when_chunked_then_each_statement_has_the_most_rows() -> None:
    assert [len(chunk) for chunk in _chunks(rows(2 * MAX_ROWS + 1))] == [MAX_ROWS, MAX_ROWS, 1]


def test_given_large_rows_when_chunked_then_each_statement_has_a_bounded_size_and_none_is_left_out() -> None:
    half, whole = rows(3, MAX_CHARS // 2), rows(1, MAX_CHARS + 1)
    assert [len(chunk) for chunk in _chunks([*half, *whole, *half[:1]])] == [2, 1, 1, 1]
    assert list(_chunks([])) == []


def test_given_tokens_of_a_door_when_made_into_a_row_then_text_and_ids_are_kept() -> None:
    row = _row(JobRequest(model="m", prompt="text", max_tokens=9), ((1, 2), 7))
    assert (row["prompt"], row["prompt_ids"], row["max_tokens"], row["params"]) == (
        "text",
        (1, 2),
        7,
        {"max_tokens": 9},
    )
