"""A completion behind its prompt, and its tokens one by one, against transformers on every kind of
tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from shardline.contract.job import FinishReason, SamplingParams
from shardline_server.tokenize import CompletionText, TokenTexts, Vocabulary
from tests.unit.tokenize import small_tokenizers as small

KINDS = {
    "byte-level": small.byte_level(),
    "byte fallback": small.byte_fallback(),
    "byte fallback, first space kept": small.byte_fallback_with_first_space(),
    "metaspace": small.metaspace(),
    "added tokens": small.added_tokens(),
    "word pieces": small.word_pieces(),
}
ODD = frozenset("\ufffd\0")
"""Bytes that are no character, and the one that Postgres cannot keep."""

ENDLESS = SamplingParams(ignore_eos=True)
of_every_kind = pytest.mark.parametrize("tokenizer", KINDS.values(), ids=KINDS.keys())


def transformers_of(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    """Its own decoding of the same tokenizer, special tokens included."""
    reference = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False
    )
    return lambda ids: str(reference.decode(list(ids), skip_special_tokens=True))


REFERENCES = {id(tokenizer): transformers_of(tokenizer) for tokenizer in KINDS.values()}


def wholes(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Tokens that begin and end with a character: any token alone that does, and characters of
    several tokens."""
    names = tokenizer.get_vocab(with_added_tokens=True)
    alone = [[number] for number in names.values() if not ODD & set(tokenizer.decode([number]))]
    several = [
        [names[f"<0x{byte:02X}>"] for byte in char.encode()]
        if "<0x00>" in names
        else tokenizer.encode(char).ids
        for char in "é漢😀"
        if "<0x00>" in names or len(names) > 256
    ]
    pieces = st.sampled_from(alone) | st.sampled_from(several or alone)
    return st.lists(pieces, max_size=30).map(
        lambda found: [token for piece in found for token in piece]
    )


def streamed(
    vocabulary: Vocabulary,
    prompt: list[int] | None,
    ids: list[int],
    params: SamplingParams = ENDLESS,
) -> str:
    completion = CompletionText(vocabulary, params, room=10_000, prompt_ids=prompt)
    return "".join(completion.push(token)[0] for token in ids) + completion.flush()


@of_every_kind
@given(data=st.data())
def test_a_completion_is_what_it_adds_to_the_text_of_its_prompt(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    prompt = data.draw(wholes(tokenizer), label="prompt")
    ids = data.draw(wholes(tokenizer), label="ids")
    decode = REFERENCES[id(tokenizer)]
    before = decode(prompt)

    text = streamed(Vocabulary(tokenizer, []), prompt, ids)

    assert before + text == decode([*prompt, *ids])


@of_every_kind
@given(data=st.data())
def test_the_texts_bytes_and_places_of_tokens_are_those_of_the_text(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    vocabulary = Vocabulary(tokenizer, [])
    prompt = data.draw(wholes(tokenizer), label="prompt")
    ids = data.draw(wholes(tokenizer), label="ids")
    text = streamed(vocabulary, prompt, ids)

    texts = TokenTexts(vocabulary, prompt_ids=prompt, with_special=False)
    cut = data.draw(st.integers(0, len(ids)), label="cut")
    told = [*texts.push(ids[:cut]), *texts.push(ids[cut:], is_end=True)]

    shown = [token for token, number in zip(told, ids, strict=True) if vocabulary.has_text(number)]
    assert "".join(token.text for token in shown) == text
    assert b"".join(token.data for token in told) == text.encode()
    assert all(text[token.offset :].startswith(token.text) for token in shown)
    assert [token.offset for token in told] == sorted(token.offset for token in told)


@of_every_kind
@given(data=st.data())
def test_tokens_of_any_bytes_join_to_the_text_and_have_their_own_bytes(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    vocabulary = Vocabulary(tokenizer, [])
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=40))
    text = streamed(vocabulary, [], ids)

    told = TokenTexts(vocabulary, prompt_ids=(), with_special=False).push(ids, is_end=True)

    texts = TokenTexts(vocabulary, prompt_ids=(), with_special=False)
    assert [
        *(token for number in ids for token in texts.push([number])),
        *texts.push([], is_end=True),
    ] == told
    assert (
        "".join(
            one.text for one, number in zip(told, ids, strict=True) if vocabulary.has_text(number)
        )
        == text
    )
    for place, (one, number) in enumerate(zip(told, ids, strict=True)):
        name = tokenizer.id_to_token(number)
        if name is not None and name.startswith("<0x"):
            byte = bytes([int(name[3:5], 16)])
            # A decoder may drop the space that begins a text, also one that is a byte's token.
            assert one.data == byte or (place, byte, one.text) == (0, b" ", "")


def test_the_first_space_of_a_completion_is_its_own() -> None:
    tokenizer = small.byte_fallback()
    vocabulary = Vocabulary(tokenizer, [])
    hello = small.id_of(tokenizer, "▁hello")
    world = small.id_of(tokenizer, "▁world")

    assert streamed(vocabulary, [hello], [world, hello]) == " world hello"
    assert streamed(vocabulary, [], [world, hello]) == "world hello"
    assert streamed(vocabulary, None, [world, hello]) == " world hello"
    assert streamed(vocabulary, [hello] * 40, [world] * 40) == " world" * 40


def test_a_character_that_the_prompt_begins_is_the_completions() -> None:
    tokenizer = small.byte_level()
    vocabulary = Vocabulary(tokenizer, [])
    first, *rest = tokenizer.encode("漢").ids
    (letter,) = tokenizer.encode("a").ids

    assert streamed(vocabulary, [letter, first], [*rest, letter]) == "漢a"
    assert streamed(vocabulary, [letter, first], [letter, letter]) == "aa"


def test_a_token_cut_at_the_end_of_the_completion_shows_that_it_is_broken() -> None:
    tokenizer = small.byte_fallback()
    told = TokenTexts(Vocabulary(tokenizer, []), prompt_ids=(), with_special=False).push(
        [1 + 0xF0], is_end=True
    )

    assert [(one.text, one.data) for one in told] == [("\ufffd", b"\xf0")]


def test_like_tokens_are_told_apart_by_their_spaces_and_bytes() -> None:
    tokenizer = small.byte_fallback()
    texts = TokenTexts(Vocabulary(tokenizer, []), prompt_ids=(), with_special=False)
    names = ("▁true", "true", "<0xF0>", "<0x41>", small.END, "\ufffd")
    ids = [small.id_of(tokenizer, name) for name in names]

    assert [tuple(texts.alternative(number)) for number in ids] == [
        (" true", b" true"),
        ("true", b"true"),
        ("\ufffd", b"\xf0"),
        ("A", b"A"),
        (small.END, b""),
        ("\ufffd", "\ufffd".encode()),
    ]


@pytest.mark.parametrize(
    "tokenizer", [KINDS["byte-level"], KINDS["byte fallback"]], ids=["byte-level", "byte fallback"]
)
def test_special_tokens_are_in_the_text_when_it_is_asked_for(tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary(tokenizer, [])
    end = small.id_of(tokenizer, small.END)
    lo = tokenizer.encode("lo").ids
    shown = SamplingParams(skip_special_tokens=False)

    assert streamed(vocabulary, lo, [*lo, end, *lo]) == "lolo"
    assert streamed(vocabulary, lo, [*lo, end, *lo], shown) == f"lo{small.END}lo"
    told = TokenTexts(vocabulary, prompt_ids=lo, with_special=True).push([end, *lo], is_end=True)
    assert (told[0].text, told[0].data, told[1].offset) == (
        small.END,
        small.END.encode(),
        len(small.END),
    )


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("stop", [small.END, f"{small.END}\n"])
def test_a_stop_that_is_a_special_token_ends_the_completion_there(skips: bool, stop: str) -> None:
    tokenizer = small.byte_level()
    end = small.id_of(tokenizer, small.END)
    lo = tokenizer.encode("lo").ids
    params = SamplingParams(stop=(stop,), skip_special_tokens=skips, min_tokens=3)
    completion = CompletionText(Vocabulary(tokenizer, []), params, room=100, prompt_ids=())

    pushed = [completion.push(token) for token in [end, *lo, end]]

    hidden = "" if skips else small.END
    assert "".join(text for text, _ in pushed) == completion.text == f"{hidden}lo"
    assert [reason for _, reason in pushed] == [None, None, None, FinishReason.STOP]
