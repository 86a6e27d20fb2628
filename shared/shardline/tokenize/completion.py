"""From output tokens to text, and the rules by which a completion ends. Owns no ids; knows no scheduler and no model.

A pure function of the tokens pushed so far: pushing a checkpoint again gives the same state and the same text. Heads
stream by it, doors join a stream again by it, and relays write partial results by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from tokenizers import Tokenizer

from shardline.job import FinishReason, SamplingParams

BROKEN = "\ufffd"
"""How decoders show bytes that are no character, or not yet."""

MAX_PENDING_CHARS = 3
"""A character has at most four bytes, so no more than three of them can wait for the last one."""

WINDOW_TOKENS = 12
"""Decoded again with each token; longer ones are cut where no character is split."""

MAX_WINDOW_TOKENS = 64
"""Cut anyway: only long runs of broken bytes have no better place."""


class Vocabulary:
    """A tokenizer as completions use it. One per model."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Iterable[int]) -> None:
        self.eos_ids = frozenset(eos_ids)
        self.special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        # A model without a tokenizer has no text at all.
        self.num_ids = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.decode = partial(tokenizer.decode, skip_special_tokens=False)

    def has_text(self, token_id: int) -> bool:
        """False for special tokens, and for the places by which models round up their vocabulary."""
        return token_id < self.num_ids and token_id not in self.special_ids


class Detokenizer:
    """Text by token, never a part of a character. All deltas and the flush together are the decoded whole."""

    __slots__ = ("_given", "_num_whole", "_vocabulary", "_window")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._window: list[int] = []
        self._given = ""
        """The part of the window's text that is given out."""
        self._num_whole = 0
        """Tokens of the window that a cut may drop without splitting a character; 0: no such cut yet."""

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        if not self._vocabulary.has_text(token_id):
            return ""
        self._window.append(token_id)
        text: str = self._vocabulary.decode(self._window)
        end = len(text.rstrip(BROKEN))
        is_whole, is_full = end == len(text), len(self._window) > MAX_WINDOW_TOKENS
        if is_full:
            end = max(end, len(text) - MAX_PENDING_CHARS)
        if not (is_whole or is_full or text.startswith(self._given)):
            return ""  # Some decoders show a whole run of bytes as broken until its last character is complete.
        delta = text[len(self._given) : end]
        self._given = text[: max(end, len(self._given))]
        if is_whole:
            self._mark_cut(text)
        elif is_full:
            self._cut(len(self._window) - WINDOW_TOKENS, text)
        return delta

    def flush(self) -> str:
        """The rest: bytes whose character never became whole."""
        text: str = self._vocabulary.decode(self._window)
        rest = text[len(self._given) :]
        self._given = text
        return rest

    def _mark_cut(self, text: str) -> None:
        size = len(self._window)
        if self._num_whole == 0:
            self._num_whole = size
        elif size >= WINDOW_TOKENS:
            # At least one token stays: decoders treat the first of a text differently.
            self._cut(self._num_whole, text)
            self._num_whole = len(self._window)

    def _cut(self, num_tokens: int, text: str) -> None:
        num_pending = len(text) - len(self._given)
        del self._window[:num_tokens]
        self._num_whole = 0
        rest: str = self._vocabulary.decode(self._window)
        self._given = rest[: len(rest) - num_pending]


class StopFinder:
    """Finds the stop string that is complete first, however tokens cut the text. Linear in the text (KMP)."""

    __slots__ = ("_borders", "_held", "_matched", "_stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._borders = [_borders(stop) for stop in stops]
        self._matched = [0] * len(stops)
        """For each stop string, how much of its beginning ends the text."""
        self._held = ""

    def push(self, delta: str, *, may_stop: bool) -> tuple[str, bool]:
        """Text that can be no part of a stop string, and whether one is complete: then the text before it."""
        if not self._stops:
            return delta, False
        text = self._held + delta
        for position in range(len(self._held), len(text)):
            length = self._advance(text[position])
            if length and may_stop:
                self._held = ""
                return text[: position + 1 - length], True
        num_held = max(self._matched)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], False

    def flush(self) -> str:
        """The text held back."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> int:
        """Length of the longest stop string that this character completes, or 0."""
        completed = 0
        for index, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            matched = self._matched[index]
            while matched and (matched == len(stop) or stop[matched] != char):
                matched = borders[matched - 1]
            matched += stop[matched] == char
            if matched == len(stop):
                completed = max(completed, matched)
            self._matched[index] = matched
        return completed


def _borders(stop: str) -> list[int]:
    """Border lengths: for each prefix, its longest proper prefix that is also its suffix (KMP)."""
    borders = [0] * len(stop)
    length = 0
    for position in range(1, len(stop)):
        while length and stop[length] != stop[position]:
            length = borders[length - 1]
        length += stop[length] == stop[position]
        borders[position] = length
    return borders


class CompletionText:
    """One job's text and end. `room` is what the context leaves after the prompt.

    The EOS or stop token is an output token like any other, but has no text. A stop string is not part of the text.
    """

    __slots__ = (
        "_detokenizer",
        "_finder",
        "_has_ended",
        "_is_cut",
        "_limit",
        "_min_tokens",
        "_num_tokens",
        "_parts",
        "_stop_ids",
    )

    def __init__(self, vocabulary: Vocabulary, params: SamplingParams, *, room: int) -> None:
        self._detokenizer = Detokenizer(vocabulary)
        self._finder = StopFinder(params.stop)
        self._limit = room if params.max_tokens is None else min(params.max_tokens, room)
        self._min_tokens = params.min_tokens
        self._stop_ids = params.stop_ids(vocabulary.eos_ids)
        self._num_tokens = 0
        self._has_ended = False
        self._is_cut = False
        """A stop string ended the text: what follows is dropped."""
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._parts)

    def push(self, token_id: int) -> tuple[str, FinishReason | None]:
        """The text that this token settles, and the reason if it is the last: then with all that was held back."""
        self._num_tokens += 1
        text, reason = "", None
        if token_id in self._stop_ids and self._num_tokens > self._min_tokens:
            reason = FinishReason.STOP
        else:
            text = self._settle(self._detokenizer.push(token_id))
            if self._is_cut:
                reason = FinishReason.STOP
            elif self._num_tokens >= self._limit:
                reason = FinishReason.LENGTH
        self._parts.append(text)
        self._has_ended = reason is not None
        return (text + self.flush() if self._has_ended else text), reason

    def say(self, ids: Iterable[int]) -> str:
        """The text that a head streams with these tokens, after those pushed before; nothing follows the end."""
        parts: list[str] = []
        for token_id in ids:
            if self._has_ended:
                break
            parts.append(self.push(token_id)[0])
        return "".join(parts)

    def flush(self) -> str:
        """The text still held back, when no token follows. A second call returns nothing."""
        if self._is_cut:
            return ""
        text = self._settle(self._detokenizer.flush()) + self._finder.flush()
        self._parts.append(text)
        return text

    def _settle(self, delta: str) -> str:
        # Postgres has no NUL in texts: a result would differ from its stream.
        delta = delta.replace("\0", BROKEN)
        text, self._is_cut = self._finder.push(delta, may_stop=self._num_tokens >= self._min_tokens)
        return text
