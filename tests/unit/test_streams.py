"""The cursor: whatever comes from stream and Postgres, in whatever order, a reader gets every token once."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from shardline.streams import Cursor
from shardline.wire import Delta

IDS = tuple(range(100, 120))


def text_of(ids: Sequence[int]) -> str:
    """Each token is one letter."""
    return "".join(chr(ord("a") + token_id - 100) for token_id in ids)


def delta(start: int, stop: int, *, fence: int = 1) -> Delta:
    return Delta(fence=fence, start=start, ids=IDS[start:stop], text=text_of(IDS[start:stop]))


def end(start: int) -> Delta:
    return Delta(fence=1, start=start, state="succeeded", finish_reason="stop")


def taken(cursor: Cursor) -> tuple[tuple[int, ...], str]:
    deltas = cursor.take()
    return tuple(token_id for one in deltas for token_id in one.ids), "".join(one.text for one in deltas)


def test_given_deltas_in_order_when_pushed_then_each_is_given_out() -> None:
    cursor = Cursor()
    for one in (delta(0, 1), delta(1, 3), end(3)):
        cursor.push(one)
    assert taken(cursor) == (IDS[:3], "abc")
    assert cursor.ended


def test_given_a_resumed_job_when_its_tokens_come_again_then_nothing_is_repeated() -> None:
    cursor = Cursor()
    for one in (delta(0, 2), delta(2, 3), delta(1, 2, fence=2), delta(2, 3, fence=2), delta(3, 4, fence=2)):
        cursor.push(one)
    assert taken(cursor) == (IDS[:4], "abcd")


def test_given_a_gap_when_postgres_fills_it_then_the_stream_goes_on() -> None:
    cursor = Cursor(text_of=text_of)
    cursor.push(delta(0, 2))
    cursor.push(delta(5, 6))
    assert cursor.has_gap
    assert taken(cursor) == (IDS[:2], "ab")

    cursor.catch_up(IDS[:4])
    assert cursor.has_gap
    cursor.catch_up(IDS[:5])

    assert not cursor.has_gap
    assert taken(cursor) == (IDS[2:6], "cdef")


def test_given_no_tokenizer_when_a_gap_is_filled_then_the_text_comes_whole_at_the_end() -> None:
    cursor = Cursor()
    cursor.push(delta(0, 2))
    cursor.catch_up(IDS[:4])
    cursor.push(delta(4, 6))
    assert taken(cursor) == (IDS[:6], "ab")

    cursor.push(end(6))
    assert cursor.has_gap
    cursor.catch_up(IDS[:6], text="abcdef", state="succeeded")

    assert taken(cursor) == ((), "cdef")
    assert cursor.ended


def test_given_a_reader_that_joins_again_when_the_stream_is_there_then_it_gets_the_rest() -> None:
    cursor = Cursor(after=3, text_of=text_of)
    for place in range(5):
        cursor.push(delta(place, place + 1))
    assert taken(cursor) == (IDS[3:5], "de")


def test_given_a_reader_that_joins_again_when_the_stream_is_lost_then_it_gets_the_rest() -> None:
    cursor = Cursor(after=3, text_of=text_of)
    cursor.catch_up(IDS[:2])
    assert taken(cursor) == ((), "")
    cursor.catch_up(IDS[:5])
    assert taken(cursor) == (IDS[3:5], "de")


def test_given_a_delta_across_the_point_of_joining_when_pushed_then_postgres_must_help() -> None:
    cursor = Cursor(after=3, text_of=text_of)
    cursor.push(delta(0, 5))
    assert cursor.has_gap
    cursor.catch_up(IDS[:6])
    assert taken(cursor) == (IDS[3:6], "def")


def test_given_a_reader_ahead_of_the_job_when_it_ends_then_it_gets_only_the_end() -> None:
    cursor = Cursor(after=9, text_of=text_of)
    cursor.catch_up(IDS[:4], text="abcd", state="cancelled")
    (last,) = cursor.take()
    assert (last.ids, last.text, last.state) == ((), "", "cancelled")


@given(
    total=st.integers(1, 20),
    after=st.integers(0, 12),
    events=st.lists(st.tuples(st.booleans(), st.integers(0, 19), st.integers(1, 4)), max_size=40),
)
def test_given_any_interleaving_when_the_job_ends_then_every_token_and_letter_came_once(
    total: int, after: int, events: list[tuple[bool, int, int]]
) -> None:
    cursor = Cursor(after=after, text_of=text_of)
    for from_stream, start, size in events:
        if from_stream and start < total:
            cursor.push(delta(start, min(start + size, total)))
        else:
            cursor.catch_up(IDS[: min(start, total)])
    cursor.push(end(total))
    cursor.catch_up(IDS[:total], text=text_of(IDS[:total]), state="succeeded")
    assert taken(cursor) == (IDS[after:total], text_of(IDS[after:total]))
    assert cursor.ended
