"""The cursor: whatever comes from stream and Postgres, in whatever order, a reader gets every token
once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.base.errors import Diverged
from shardline.contract.job import JobProgress, JobState
from shardline.contract.wire import Delta
from shardline.streams import Cursor, Place

IDS = tuple(range(100, 120))


def text_of(ids: Sequence[int]) -> str:
    """Each token is one letter."""
    return "".join(chr(ord("a") + token_id - 100) for token_id in ids)


def delta(start: int, stop: int, *, fence: int = 1) -> Delta:
    return Delta(fence=fence, start=start, ids=IDS[start:stop], text=text_of(IDS[start:stop]))


def end(start: int) -> Delta:
    return Delta(fence=1, start=start, state="succeeded", finish_reason="stop")


def saved(
    start: int,
    ids: Sequence[int],
    *,
    fence: int,
    text: str | None = None,
    state: JobState | None = None,
) -> JobProgress:
    """What Postgres has from `start` on."""
    return JobProgress(fence=fence, start=start, token_ids=tuple(ids), text=text, state=state)


def place(num_tokens: int) -> Place:
    """Of a reader that has so many of the tokens."""
    return Place().then(IDS[:num_tokens])


def taken(cursor: Cursor) -> tuple[tuple[int, ...], str]:
    deltas = cursor.take()
    return tuple(token_id for one in deltas for token_id in one.ids), "".join(
        one.text for one in deltas
    )


def test_deltas_in_order_are_given_out() -> None:
    cursor = Cursor()
    for one in (delta(0, 1), delta(1, 3), end(3)):
        cursor.push(one)
    assert taken(cursor) == (IDS[:3], "abc")
    assert cursor.ended


def test_tokens_that_a_resumed_job_repeats_are_not_given_out_again() -> None:
    cursor = Cursor()
    for one in (
        delta(0, 2),
        delta(2, 3),
        delta(1, 2, fence=2),
        delta(2, 3, fence=2),
        delta(3, 4, fence=2),
    ):
        cursor.push(one)
    assert cursor.has_gap, "only Postgres knows with which tokens the second attempt began"
    assert cursor.asked() == (2, 0, 0)
    cursor.catch_up(saved(0, IDS[:1], fence=2))
    assert not cursor.has_gap
    assert taken(cursor) == (IDS[:4], "abcd")


def test_the_stream_goes_on_once_postgres_has_filled_a_gap() -> None:
    cursor = Cursor(text_of=text_of)
    cursor.push(delta(0, 2))
    cursor.push(delta(5, 6))
    assert cursor.has_gap
    assert taken(cursor) == (IDS[:2], "ab")

    cursor.catch_up(saved(0, IDS[:4], fence=1))
    assert cursor.has_gap
    cursor.catch_up(saved(0, IDS[:5], fence=1))

    assert not cursor.has_gap
    assert taken(cursor) == (IDS[2:6], "cdef")


def test_the_text_comes_whole_at_the_end_without_a_tokenizer() -> None:
    cursor = Cursor()
    cursor.push(delta(0, 2))
    cursor.catch_up(saved(0, IDS[:4], fence=1))
    cursor.push(delta(4, 6))
    assert taken(cursor) == (IDS[:6], "ab")

    cursor.push(end(6))
    assert cursor.has_gap
    cursor.catch_up(saved(0, IDS[:6], fence=1, text="abcdef", state=JobState.SUCCEEDED))

    assert taken(cursor) == ((), "cdef")
    assert cursor.ended


def test_a_reader_that_rejoins_a_stream_gets_the_rest() -> None:
    cursor = Cursor(after=place(3), text_of=text_of)
    for start in range(5):
        cursor.push(delta(start, start + 1))
    assert taken(cursor) == (IDS[3:5], "de")


def test_a_reader_that_rejoins_after_the_stream_was_lost_gets_the_rest() -> None:
    cursor = Cursor(after=place(3), text_of=text_of)
    cursor.catch_up(saved(0, IDS[:2], fence=1))
    assert taken(cursor) == ((), "")
    cursor.catch_up(saved(0, IDS[:5], fence=1))
    assert taken(cursor) == (IDS[3:5], "de")


def test_a_reader_that_rejoins_ahead_of_what_is_saved_gets_no_text_twice_at_the_end() -> None:
    cursor = Cursor(after=place(5), text_of=text_of)
    cursor.catch_up(saved(0, IDS[:2], fence=1))
    cursor.catch_up(saved(0, IDS[:8], fence=1, text="abcdefgh", state=JobState.SUCCEEDED))
    assert taken(cursor) == (IDS[5:8], "fgh")


def test_a_delta_across_the_point_of_joining_needs_postgres() -> None:
    cursor = Cursor(after=place(3), text_of=text_of)
    cursor.push(delta(0, 5))
    assert cursor.has_gap
    cursor.catch_up(saved(0, IDS[:6], fence=1))
    assert taken(cursor) == (IDS[3:6], "def")


def test_a_reader_ahead_of_the_job_gets_only_the_end() -> None:
    cursor = Cursor(after=Place(num_tokens=9, digest=None), text_of=text_of)
    cursor.catch_up(saved(0, IDS[:4], fence=1, text="abcd", state=JobState.CANCELLED))
    (last,) = cursor.take()
    assert (last.ids, last.text, last.state) == ((), "", "cancelled")


def test_a_reader_ahead_of_the_job_gets_no_text_that_was_held_back_before() -> None:
    # as behind the beginning of a stop string
    cursor = Cursor(after=place(9), text_of=lambda _: "")
    cursor.catch_up(saved(0, IDS[:4], fence=1, text="abcd", state=JobState.CANCELLED))
    assert taken(cursor) == ((), "")
    assert cursor.ended


def test_text_that_a_shorter_result_still_has_stands_behind_the_tokens_given() -> None:
    cursor = Cursor()
    cursor.push(Delta(fence=1, start=0, ids=IDS[:5], text="ab"))
    cursor.take()
    cursor.catch_up(saved(0, IDS[:3], fence=1, text="abc", state=JobState.CANCELLED))
    (last,) = cursor.take()
    assert (last.start, last.ids, last.text) == (5, (), "c")


@settings(max_examples=1_000)
@given(
    total=st.integers(1, 20),
    after=st.integers(0, 12),
    events=st.lists(st.tuples(st.booleans(), st.integers(0, 19), st.integers(1, 4)), max_size=40),
)
def test_every_token_and_letter_comes_once_in_any_interleaving(
    total: int, after: int, events: list[tuple[bool, int, int]]
) -> None:
    after = min(after, total)
    cursor = Cursor(after=place(after), text_of=text_of)
    for from_stream, start, size in events:
        if from_stream and start < total:
            cursor.push(delta(start, min(start + size, total)))
        else:
            cursor.catch_up(saved(0, IDS[: min(start, total)], fence=1))
    cursor.push(end(total))
    cursor.catch_up(
        saved(0, IDS[:total], fence=1, text=text_of(IDS[:total]), state=JobState.SUCCEEDED)
    )
    assert taken(cursor) == (IDS[after:total], text_of(IDS[after:total]))
    assert cursor.ended


OTHER_IDS = (*IDS[:2], *range(202, 206))
"""What a head of another exactness makes of the same job, from its third token on."""


def other(start: int) -> Delta:
    return Delta(fence=2, start=start, ids=OTHER_IDS[start : start + 1], text="B")


def test_a_reader_is_told_when_another_exactness_changes_the_tokens() -> None:
    cursor = Cursor()
    cursor.catch_up(saved(0, (), fence=1), only_learn=True)
    for number in range(5):
        cursor.push(delta(number, number + 1))
    assert taken(cursor) == (IDS[:5], "abcde")

    for number in range(2, 6):
        cursor.push(other(number))
    with pytest.raises(Diverged, match="token 2"):
        cursor.catch_up(saved(0, OTHER_IDS[:2], fence=2))

    assert cursor.take() == []


def test_a_delta_after_lost_changed_tokens_is_not_spliced_on() -> None:
    cursor = Cursor()
    cursor.push(delta(0, 5))
    taken(cursor)
    cursor.push(other(5))
    assert (taken(cursor), cursor.has_gap) == (((), ""), True)
    cursor.catch_up(saved(0, OTHER_IDS[:2], fence=2))
    assert (taken(cursor), cursor.has_gap) == (((), ""), True)
    with pytest.raises(Diverged):
        cursor.catch_up(saved(2, OTHER_IDS[2:6], fence=2))


@pytest.mark.parametrize("num_saved", [4, 6])
def test_a_reader_that_missed_all_deltas_of_the_other_head_is_told_at_the_end(
    num_saved: int,
) -> None:
    cursor = Cursor()
    cursor.push(delta(0, 5))
    fence, same_start, other_start = cursor.asked()
    assert (fence, same_start, other_start) == (1, 5, 0)
    with pytest.raises(Diverged):
        cursor.catch_up(
            saved(
                other_start,
                OTHER_IDS[:num_saved],
                fence=2,
                text="ab" + "B" * 4,
                state=JobState.SUCCEEDED,
            )
        )


def test_a_late_reader_of_both_heads_deltas_gets_those_that_count() -> None:
    cursor = Cursor()
    cursor.catch_up(saved(0, OTHER_IDS[:3], fence=2), only_learn=True)
    for one in [
        *(delta(number, number + 1) for number in range(5)),
        *(other(number) for number in range(2, 6)),
    ]:
        cursor.push(one)
    assert taken(cursor) == (OTHER_IDS, "abBBBB")


def test_a_reader_that_rejoins_with_outdated_tokens_is_told() -> None:
    for after in (place(5), place(6)):
        cursor = Cursor(after=after, text_of=text_of)
        with pytest.raises(Diverged):
            cursor.catch_up(
                saved(0, OTHER_IDS[:5], fence=2, text="abBBB", state=JobState.SUCCEEDED)
            )
    assert taken(cursor) == ((), "")
    cursor = Cursor(after=place(2), text_of=text_of)
    cursor.catch_up(saved(0, OTHER_IDS[:5], fence=2, text="abBBB", state=JobState.SUCCEEDED))
    assert taken(cursor) == (OTHER_IDS[2:5], "BBB")


def test_a_shorter_partial_result_is_the_end_of_a_cancelled_job() -> None:
    cursor = Cursor()
    cursor.push(delta(0, 5))
    cursor.catch_up(saved(0, IDS[:3], fence=1, text="abc", state=JobState.CANCELLED))
    assert taken(cursor) == (IDS[:5], "abcde")
    assert cursor.ended


def test_nothing_is_lost_or_repeated_between_pages_and_the_stream() -> None:
    cursor = Cursor()
    cursor.catch_up(saved(0, IDS[:4], fence=1), only_learn=True)
    assert cursor.asked(only_learn=True) == (1, 4, 4)
    assert cursor.asked() == (1, 0, 0)
    cursor.push(delta(0, 3))
    cursor.catch_up(saved(3, IDS[3:6], fence=1))
    cursor.push(delta(6, 7))
    assert taken(cursor)[0] == IDS[:7]


@pytest.mark.parametrize("text", ["0", "7", "7-0123abcd"])
def test_a_place_reads_back_from_its_text(text: str) -> None:
    found = Place.parse(text)
    assert found is not None
    assert str(found) == text


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "1-", "1-0123ABCD", "1-0123abcde", "9999999999", "٣", "1 "]
)
def test_text_that_is_no_place_is_none(text: str) -> None:
    assert Place.parse(text) is None
