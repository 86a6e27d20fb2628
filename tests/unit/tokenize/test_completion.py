"""Text by token, stop strings across token borders, and every way a completion ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from tokenizers import Tokenizer, models

from shardline.contract.job import FinishReason, SamplingParams
from shardline_server.tokenize import Vocabulary
from shardline_server.tokenize.completion import (
    MAX_WINDOW_TOKENS,
    CompletionText,
    Detokenizer,
    StopFinder,
)
from tests.unit.tokenize.small_tokenizers import byte_fallback, byte_level

BYTES = byte_level()
PIECES = byte_fallback()


def id_of(piece: str) -> int:
    token = BYTES.token_to_id(piece)
    assert token is not None
    return token


END = id_of("<|end|>")
byte_ids = st.lists(st.integers(0, END + 3), max_size=120)
"""Any tokens, the special one and unknown ones included."""


def ids_of(text: str) -> list[int]:
    return list(BYTES.encode(text).ids)


def completion(params: SamplingParams, room: int = 1000) -> CompletionText:
    return CompletionText(Vocabulary(BYTES, [END]), params, room=room, prompt_ids=())


def push_all(one: CompletionText, ids: list[int]) -> tuple[list[str], FinishReason | None]:
    """The deltas up to the end, the flush included."""
    deltas = []
    reason = None
    for token in ids:
        delta, reason = one.push(token)
        deltas.append(delta)
        if reason is not None:
            break
    return [*deltas, one.flush()], reason


@given(byte_ids)
def test_the_deltas_are_the_decoded_whole_whatever_the_tokens(ids: list[int]) -> None:
    detokenizer = Detokenizer(Vocabulary(BYTES, [END]), prompt_ids=())

    deltas = [detokenizer.push(token) for token in ids]

    assert "".join(deltas) + detokenizer.flush() == BYTES.decode(ids)


def test_without_a_tokenizer_tokens_have_no_text_and_the_limits_hold_all_the_same() -> None:
    nothing = Tokenizer(models.WordLevel({}, unk_token=""))
    one = CompletionText(
        Vocabulary(nothing, [7]), SamplingParams(max_tokens=9), room=1000, prompt_ids=()
    )

    assert push_all(one, [5, 6, 7]) == (["", "", "", ""], FinishReason.STOP)
    assert CompletionText(Vocabulary(nothing, []), SamplingParams(), room=1, prompt_ids=()).push(
        5
    ) == (
        "",
        FinishReason.LENGTH,
    )


@given(st.text(max_size=60))
def test_no_delta_splits_a_character(text: str) -> None:
    detokenizer = Detokenizer(Vocabulary(BYTES, [END]), prompt_ids=())

    deltas = [detokenizer.push(token) for token in ids_of(text)]

    assert "".join(deltas) + detokenizer.flush() == text
    assert all(delta in ("", char) for delta in deltas for char in (delta[:1],))


@given(
    st.lists(
        st.one_of(
            st.sampled_from([[257], [258], [259], [260], [999]]),
            st.characters(codec="utf-8").map(lambda char: [byte + 1 for byte in char.encode()]),
        ),
        max_size=60,
    )
)
def test_words_and_bytes_of_sentencepiece_models_come_out_whole(pieces: list[list[int]]) -> None:
    ids = [token for piece in pieces for token in piece]
    detokenizer = Detokenizer(Vocabulary(PIECES, []), prompt_ids=())

    deltas = [detokenizer.push(token) for token in ids]

    assert "".join(deltas) + detokenizer.flush() == PIECES.decode(ids)


def test_a_meant_replacement_character_is_none_of_the_broken_bytes_behind_it() -> None:
    detokenizer = Detokenizer(Vocabulary(PIECES, []), prompt_ids=())
    ids = [byte + 1 for byte in "\ufffdࠀ".encode()]

    assert [detokenizer.push(token) for token in ids] == ["", "", "", "", "", "\ufffdࠀ"]


def test_a_token_that_ends_inside_a_character_gives_only_what_is_whole() -> None:
    detokenizer = Detokenizer(Vocabulary(BYTES, [END]), prompt_ids=())
    pieces = ["â", "Ĥ", "¬ðŁ", "ĺ", "Ģ"]

    assert [detokenizer.push(id_of(piece)) for piece in pieces] == ["", "", "€", "", "😀"]


def test_endless_broken_bytes_cost_no_more_with_time() -> None:
    detokenizer = Detokenizer(Vocabulary(BYTES, [END]), prompt_ids=())
    ids = [id_of("ðŁĺ")] * 3000

    deltas = [detokenizer.push(token) for token in ids]

    assert len(detokenizer._window) <= MAX_WINDOW_TOKENS
    assert "".join(deltas) + detokenizer.flush() == BYTES.decode(ids)


def first_stop(text: str, stops: tuple[str, ...]) -> str | None:
    """The text before the stop string that is complete first."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return None


few_letters = st.text(alphabet="ab€", max_size=30)


@given(
    st.lists(few_letters, max_size=12), st.lists(few_letters.filter(bool), min_size=1, max_size=4)
)
def test_stop_strings_are_found_however_the_text_is_cut(
    pieces: list[str], stops: list[str]
) -> None:
    finder = StopFinder(tuple(stops))
    text = "".join(pieces)
    given_out = ""
    stopped = False
    for piece in pieces:
        delta, stopped = finder.push(piece, may_stop=True)
        given_out += delta
        if stopped:
            break

    expected = first_stop(text, tuple(stops))
    assert stopped == (expected is not None)
    assert (given_out if stopped else given_out + finder.flush()) == (
        text if expected is None else expected
    )


def test_text_is_held_back_only_while_it_may_begin_a_stop_string() -> None:
    one = completion(SamplingParams(stop=("abc",)))

    assert [one.push(token)[0] for token in ids_of("xabxab")] == ["x", "", "", "abx", "", ""]
    assert one.flush() == "ab"
    assert one.text == "xabxab"


def test_a_stop_string_ends_the_completion_and_is_no_part_of_the_text() -> None:
    one = completion(SamplingParams(stop=("lo w",)))

    deltas, reason = push_all(one, ids_of("hello world"))

    assert reason is FinishReason.STOP
    assert "".join(deltas) == one.text == "hel"


@pytest.mark.parametrize(
    ("params", "ids", "text"),
    [
        (SamplingParams(stop=("lo w",)), ids_of("hello world"), "hello w"),
        (SamplingParams(stop_token_ids=(id_of("w"),)), ids_of("hello world"), "hello w"),
        (SamplingParams(), [*ids_of("abc"), END], "abc"),
        (SamplingParams(skip_special_tokens=False), [*ids_of("abc"), END], "abc<|end|>"),
        (SamplingParams(stop=("x",)), ids_of("abc"), "abc"),
    ],
)
def test_an_included_stop_ends_the_text(params: SamplingParams, ids: list[int], text: str) -> None:
    for size in range(len(ids) + 1):
        one = completion(structs.replace(params, include_stop_str_in_output=True))
        said = [one.say(ids[:size]), one.say(ids[size:]), one.flush()]

        assert "".join(said) == one.text == text


def test_nothing_follows_a_stop_string_even_if_its_token_held_more() -> None:
    one = completion(SamplingParams(stop=("€",)))

    deltas, reason = push_all(one, [id_of(piece) for piece in ["â", "Ĥ", "¬ðŁ"]])

    assert (deltas, reason) == (["", "", "", ""], FinishReason.STOP)


def test_eos_ends_the_completion_without_text() -> None:
    one = completion(SamplingParams(stop=("hip",)))

    deltas, reason = push_all(one, [*ids_of("hi"), END])

    assert (deltas, reason) == (["", "", "hi", ""], FinishReason.STOP)


def test_eos_is_an_ordinary_token_when_it_is_ignored() -> None:
    one = completion(SamplingParams(ignore_eos=True, max_tokens=3))

    assert push_all(one, [END, END, END]) == (["", "", "", ""], FinishReason.LENGTH)


def test_a_stop_token_ends_the_completion_without_its_text() -> None:
    (stop,) = ids_of("!")
    one = completion(SamplingParams(stop_token_ids=(stop,)))

    deltas, reason = push_all(one, ids_of("hi!"))

    assert ("".join(deltas), reason) == ("hi", FinishReason.STOP)


@pytest.mark.parametrize(("max_tokens", "room"), [(3, 100), (100, 3), (None, 3)])
def test_the_shorter_of_max_tokens_and_context_ends_it(max_tokens: int | None, room: int) -> None:
    one = completion(SamplingParams(max_tokens=max_tokens), room=room)

    deltas, reason = push_all(one, ids_of("hello"))

    assert ("".join(deltas), reason) == ("hel", FinishReason.LENGTH)


def test_a_stop_at_the_last_place_is_a_stop() -> None:
    assert push_all(completion(SamplingParams(max_tokens=1)), [END])[1] is FinishReason.STOP


def test_stops_count_only_from_min_tokens_on() -> None:
    one = completion(SamplingParams(min_tokens=4, stop=("ab",)))

    deltas, reason = push_all(one, ids_of("abcab?"))

    assert ("".join(deltas), reason) == ("abc", FinishReason.STOP)
    assert one.push(END)[1] is FinishReason.STOP
    assert completion(SamplingParams(min_tokens=1)).push(END)[1] is None


@given(byte_ids, st.integers(0, 120), st.sampled_from([(), ("ab",), ("\ufffd\ufffd", "h")]))
def test_a_replayed_checkpoint_goes_on_with_the_same_text(
    ids: list[int], cut: int, stop: tuple[str, ...]
) -> None:
    params = SamplingParams(stop=stop, max_tokens=100)
    first = completion(params)
    resumed = completion(params)

    whole = [first.push(token) for token in ids]
    for token in ids[:cut]:
        resumed.push(token)

    assert [resumed.push(token) for token in ids[cut:]] == whole[cut:]
    assert (resumed.flush(), resumed.text) == (first.flush(), first.text)
