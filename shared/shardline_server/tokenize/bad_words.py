"""The token sequences that spell words which a completion must not hold. Knows no logits."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from shardline.base.errors import Invalid

FIELD = "bad_words"
MAX_WORD_TOKENS = 64
"""A tail compares each of them with the completion's end, for each token."""

BannedIds = tuple[tuple[int, ...], ...]
"""Of each sequence the last token must not follow the others."""


def banned_ids(tokenizer: Tokenizer, words: Sequence[str], *, vocab_size: int) -> BannedIds:
    """Returns the tokens of each word as it begins a text and behind a space, without repeats.
    Raises Invalid for a word that no tokens spell, or too many."""
    found: dict[tuple[int, ...], None] = {}
    for place, word in enumerate(words):
        spelled = [_ids(tokenizer, text, f"{FIELD}[{place}]") for text in _spellings(word)]
        problem = _problem(spelled, vocab_size)
        if problem:
            raise Invalid(f"{FIELD}[{place}]", problem, "Send another word, or leave it out")
        found |= dict.fromkeys(ids for ids in spelled if ids)
    return tuple(found)


def _spellings(word: str) -> tuple[str, ...]:
    """White space alone is taken as it is."""
    bare = word.lstrip()
    return (bare, f" {bare}") if bare else (word,)


def _ids(tokenizer: Tokenizer, text: str, field: str) -> tuple[int, ...]:
    try:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)
    except TypeError as error:
        raise Invalid(
            field, "it holds characters that are not valid Unicode", "Remove lone surrogates"
        ) from error


def _problem(spelled: Sequence[tuple[int, ...]], vocab_size: int) -> str:
    if not any(spelled):
        return "the tokenizer makes no token of it"
    longest = max(map(len, spelled))
    if longest > MAX_WORD_TOKENS:
        return f"it makes {longest} tokens, {MAX_WORD_TOKENS} is the limit"
    unknown = [token_id for ids in spelled for token_id in ids if token_id >= vocab_size]
    return f"token {unknown[0]} is not in the vocabulary of {vocab_size}" if unknown else ""
