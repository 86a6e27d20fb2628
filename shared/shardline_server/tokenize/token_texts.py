"""What each output token adds to a text, as log-probabilities show it: its text, its bytes, its
place.

Together the texts are the completion's, and the bytes are its UTF-8. Knows no job and no answer's
shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardline_server.tokenize.completion import Detokenizer
from shardline_server.tokenize.vocabulary import BROKEN, Piece, Vocabulary


class TokenText(NamedTuple):
    """One output token.

    A token that ends inside a character has no text: the one that completes it has the whole
    character. One that adds nothing to the text, as special tokens do, shows its name and has no
    bytes.
    """

    text: str
    data: bytes
    offset: int
    """Characters of the completion before it."""


class TokenTexts:
    """The tokens of one completion, in order, whether they come at once or in the chunks of a
    stream."""

    def __init__(
        self, vocabulary: Vocabulary, *, prompt_ids: Sequence[int], with_special: bool
    ) -> None:
        self._vocabulary = vocabulary
        self._detokenizer = Detokenizer(
            vocabulary, prompt_ids=prompt_ids, with_special=with_special
        )
        self._num_chars = 0
        self._waiting: list[TokenText] = []
        """The last token with text, if it ends inside a character, and those behind it: if no
        character comes of it, its text is that it is broken."""

    def push(self, ids: Iterable[int], *, is_end: bool = False) -> list[TokenText]:
        """The next tokens that are settled, in order: of these ids and of those that wait. With
        `is_end` all of them: the last one with text has the bytes of which no character will
        come."""
        found = [*self._waiting, *(self._next(token_id) for token_id in ids)]
        num_settled = len(found)
        if self._detokenizer.has_pending:
            num_settled = max(
                (place for place, token in enumerate(found) if token.data), default=num_settled
            )
        rest = self._detokenizer.flush() if is_end else ""
        if rest and num_settled < len(found):
            last = found[num_settled]
            found[num_settled] = last._replace(text=last.text + rest)
        self._waiting = [] if is_end else found[num_settled:]
        return found if is_end else found[:num_settled]

    def _next(self, token_id: int) -> TokenText:
        offset = self._num_chars
        if not self._detokenizer.has_text(token_id):
            return TokenText(self._vocabulary.name(token_id), b"", offset)
        was_pending = self._detokenizer.has_pending
        text = self._detokenizer.push(token_id)
        self._num_chars += len(text)
        is_whole = not was_pending and not self._detokenizer.has_pending and BROKEN not in text
        data = text.encode() if is_whole else self._vocabulary.piece(token_id).data
        # As in the text itself, which Postgres keeps.
        return TokenText(text.replace("\0", BROKEN), data, offset)

    def alternative(self, token_id: int) -> Piece:
        """A token that could have come in place of one of them."""
        if self._detokenizer.has_text(token_id):
            return self._vocabulary.piece(token_id)
        return Piece(self._vocabulary.name(token_id), b"")
