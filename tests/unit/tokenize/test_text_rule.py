"""One rule for text: whoever joins a stream after any token gets exactly the rest of the result's
text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shardline.contract.job import FinishReason, JobProgress, JobState, SamplingParams
from shardline.contract.wire import Delta
from shardline.streams import Cursor, Place
from shardline_server.tokenize import CompletionText, Vocabulary
from tests.unit.tokenize.small_tokenizers import byte_fallback, byte_level

BYTES = byte_level()
PIECES = byte_fallback()
EOS = {id(BYTES): 259, id(PIECES): 0}
MAX_ID = 262


def characters(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Whole characters of one to four bytes, as that tokenizer's bytes."""
    first = 1 if tokenizer is PIECES else 0
    return st.sampled_from("a \0é€😀\ufffd").map(
        lambda char: (
            [first + byte for byte in char.encode()]
            if tokenizer is PIECES
            else list(tokenizer.encode(char).ids)
        )
    )


def outputs(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any tokens: whole characters, halves of some, words, special and unknown ones."""
    pieces = st.one_of(characters(tokenizer), st.integers(0, MAX_ID).map(lambda token: [token]))
    return st.lists(pieces, max_size=24).map(
        lambda found: [token for piece in found for token in piece]
    )


params = st.builds(
    SamplingParams,
    min_tokens=st.integers(0, 6),
    max_tokens=st.integers(1, 80),
    stop=st.lists(st.text(alphabet="ab é€\ufffd", min_size=1, max_size=3), max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers(0, MAX_ID), max_size=2).map(tuple),
    ignore_eos=st.booleans(),
)


def heads_deltas(one: CompletionText, ids: list[int]) -> tuple[list[Delta], Delta, str]:
    """What a head streams of a job, its end, and the text of the result."""
    deltas = []
    reason = None
    for place, token in enumerate(ids):
        text, reason = one.push(token)
        deltas.append(Delta(fence=1, start=place, ids=(token,), text=text))
        if reason is not None:
            break
    state, tail = ("succeeded", "") if reason else ("cancelled", one.flush())
    end = Delta(
        fence=1,
        start=len(deltas),
        text=tail,
        state=state,
        finish_reason=reason or FinishReason.CANCELLED,
    )
    return deltas, end, one.text


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte-level", "byte-fallback"])
@settings(max_examples=400)
@given(data=st.data(), params=params)
def test_the_rest_of_a_stream_joined_after_any_token_is_the_rest_of_the_text(
    tokenizer: Tokenizer, data: st.DataObject, params: SamplingParams
) -> None:
    vocabulary = Vocabulary(tokenizer, [EOS[id(tokenizer)]])
    deltas, end, whole = heads_deltas(
        CompletionText(vocabulary, params, room=100, prompt_ids=()), data.draw(outputs(tokenizer))
    )
    ids = tuple(token for delta in deltas for token in delta.ids)
    given_out = [""]
    for delta in deltas:
        given_out.append(given_out[-1] + delta.text)
    assert given_out[-1] + end.text == whole
    assert all(whole.startswith(text) for text in given_out)

    joined = data.draw(st.integers(0, len(ids)), label="joined")
    saved = data.draw(st.integers(0, len(ids)), label="saved")
    cursor = Cursor(
        after=Place().then(ids[:joined]),
        text_of=CompletionText(vocabulary, params, room=100, prompt_ids=()).say,
    )
    cursor.catch_up(JobProgress(fence=1, token_ids=ids[:saved]))
    for delta in [*deltas, end][saved if saved >= joined else 0 :]:
        cursor.push(delta)
    if not cursor.ended:
        _, start, _ = cursor.asked()
        state = JobState(end.state or "")
        cursor.catch_up(
            JobProgress(fence=1, start=start, token_ids=ids[start:], text=whole, state=state)
        )
    rest = "".join(delta.text for delta in cursor.take())
    assert given_out[joined] + rest == whole


@given(data=st.data(), params=params)
def test_the_text_of_a_job_ended_by_a_relay_begins_as_its_stream_did(
    data: st.DataObject, params: SamplingParams
) -> None:
    vocabulary = Vocabulary(PIECES, [EOS[id(PIECES)]])
    deltas, _, _ = heads_deltas(
        CompletionText(vocabulary, params, room=100, prompt_ids=()), data.draw(outputs(PIECES))
    )
    num_saved = data.draw(st.integers(0, len(deltas)))
    relays = CompletionText(vocabulary, params, room=100, prompt_ids=())
    text = relays.say(token for delta in deltas[:num_saved] for token in delta.ids) + relays.flush()
    assert text.startswith("".join(delta.text for delta in deltas[:num_saved]))
