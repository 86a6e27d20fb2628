"""What a tokenizer knows of its tokens: which have text, and the text and bytes that each one
stands for inside a text.

Knows no completion: a sequence of tokens becomes text in `completion`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

from tokenizers import Tokenizer

BROKEN = "\ufffd"
"""How decoders show bytes that are no character, or not yet."""

MAX_PIECES = 1 << 15
"""Kept of one vocabulary: those that log-probabilities name again and again."""

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How sentencepiece names the token of one byte."""


class Piece(NamedTuple):
    """A token inside a text. Its bytes may be no whole character; then its text shows them as
    broken."""

    text: str
    data: bytes


class Vocabulary:
    """A tokenizer as completions use it. One per model."""

    def __init__(
        self, tokenizer: Tokenizer, eos_ids: Iterable[int], *, markers: Collection[str] = ()
    ) -> None:
        """`markers` are texts of special tokens that are text in any case: they mark the parts of a
        reply."""
        self.eos_ids = frozenset(eos_ids)
        added = tokenizer.get_added_tokens_decoder().items()
        self.added_tokens = {token.content: token_id for token_id, token in added}
        """Ids by text of the tokens that no text is split into by chance."""
        self.special_tokens = {
            token.content: token_id for token_id, token in added if token.special
        }
        """Ids by text of the tokens that are marked as special."""
        self._special_ids = frozenset(
            token_id for text, token_id in self.special_tokens.items() if text not in markers
        )
        # A model without a tokenizer has no text at all.
        self.num_ids = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.decode = partial(tokenizer.decode, skip_special_tokens=False)
        self._name = tokenizer.id_to_token
        self.piece = lru_cache(maxsize=MAX_PIECES)(self._piece)

    def has_text(self, token_id: int, *, with_special: bool = False) -> bool:
        """False for the places by which models round up their vocabulary, and, unless they are
        asked for, for special tokens."""
        return token_id < self.num_ids and (with_special or token_id not in self._special_ids)

    def name(self, token_id: int) -> str:
        """The token alone, as log-probabilities name one that has no text: special tokens show
        their name."""
        return str(self.decode([token_id]))

    def _piece(self, token_id: int) -> Piece:
        """The token behind another one: many decoders drop the space that begins a text."""
        anchor, before = self.anchor
        whole: str = self.decode([*anchor, token_id])
        text = whole[len(before) :] if whole.startswith(before) else self.name(token_id)
        return Piece(text, self._data(token_id) if BROKEN in text else text.encode())

    @cached_property
    def anchor(self) -> tuple[Sequence[int], str]:
        """An ordinary token that can stand before others, and its text; none where no token has a
        letter or digit."""
        for token_id in range(self.num_ids):
            if self.has_text(token_id) and not BYTE_TOKEN.fullmatch(self._name(token_id) or ""):
                text = self.name(token_id)
                if text.isascii() and text.isalnum():
                    return (token_id,), text
        return (), ""

    def _data(self, token_id: int) -> bytes:
        """The bytes of a token that ends inside a character, or begins there; by its name, as no
        decoder shows them."""
        name = self._name(token_id) or ""
        if found := BYTE_TOKEN.fullmatch(name):
            return bytes([int(found[1], 16)])
        if all(char in BYTE_LEVEL for char in name):
            return bytes(BYTE_LEVEL[char] for char in name)
        return name.encode()


def _byte_level() -> dict[str, int]:
    """Bytes by the characters that name them in byte-level vocabularies: printable ones of Latin-1
    by themselves, the others in order from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    named = {chr(byte): byte for byte in printable}
    return named | {chr(0x100 + place): byte for place, byte in enumerate(others)}


BYTE_LEVEL = _byte_level()
