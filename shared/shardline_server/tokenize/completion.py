"""Turns output tokens into text, and has the rules by which a completion ends. Owns no ids; knows
no scheduler and no model.

A pure function of the prompt's last tokens and the tokens pushed so far: pushing a checkpoint again
gives the same state and the same text. Heads stream by it, doors join a stream again by it, and
relays write partial results by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardline.contract.job import PROMPT_END_TOKENS, FinishReason, SamplingParams
from shardline_server.tokenize.vocabulary import BROKEN, Vocabulary

MAX_PENDING_CHARS = 3
"""A character has at most four bytes, so no more than three of them can wait for the last one."""

WINDOW_TOKENS = 12
"""Decoded again with each token; longer ones are cut where no character is split."""

MAX_WINDOW_TOKENS = 64
"""Cut anyway: only long runs of broken bytes have no better place."""


class Detokenizer:
    """Text by token, never a part of a character. All deltas and the flush together are what the
    tokens add to the text of the prompt: a decoder that drops the space which begins a text keeps
    the one between prompt and completion. Without `prompt_ids` some prompt is taken to be there."""

    __slots__ = (
        "_given",
        "_num_whole",
        "_prompts",
        "_vocabulary",
        "_window",
        "_with_special",
        "has_pending",
    )

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        prompt_ids: Sequence[int] | None = None,
        with_special: bool = False,
    ) -> None:
        self._vocabulary = vocabulary
        self._with_special = with_special
        before = vocabulary.anchor[0] if prompt_ids is None else prompt_ids[-PROMPT_END_TOKENS:]
        self._window = [token_id for token_id in before if self.has_text(token_id)]
        text = self._begin()
        self._given = text.rstrip(BROKEN)
        """The part of the window's text that is given out, or is the prompt's."""
        self._prompts = text[len(self._given) :]
        """The broken bytes that end the prompt: they are no text of the completion, unless it makes
        them whole."""
        self._num_whole = 0 if self._prompts else len(self._window)
        """Tokens of the window that a cut may drop without splitting a character; 0: no such cut
        yet."""
        self.has_pending = bool(self._prompts)
        """Whether the last token ended inside a character."""

    def _begin(self) -> str:
        """The text of the prompt's end, from where a character begins: some decoders show a run of
        bytes that begins inside one as broken altogether."""
        if not self._window:
            return ""
        whole: str = self._vocabulary.decode(self._window)
        for num_cut in range(min(MAX_PENDING_CHARS + 1, len(self._window))):
            text: str = self._vocabulary.decode(self._window[num_cut:])
            if not text.startswith(BROKEN):
                del self._window[:num_cut]
                return text
        return whole

    def has_text(self, token_id: int) -> bool:
        """Whether the token can add to the text."""
        return self._vocabulary.has_text(token_id, with_special=self._with_special)

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        if not self.has_text(token_id):
            return ""
        self._window.append(token_id)
        text: str = self._vocabulary.decode(self._window)
        end = len(text.rstrip(BROKEN))
        is_whole = end == len(text)
        is_full = len(self._window) > MAX_WINDOW_TOKENS
        self.has_pending = not is_whole
        if is_full:
            end = max(end, len(text) - MAX_PENDING_CHARS)
        if not (is_whole or is_full or text.startswith(self._given)):
            # Some decoders show a whole run of bytes as broken until its last character is
            # complete.
            return ""
        delta = text[len(self._given) : end]
        self._given = text[: max(end, len(self._given))]
        if is_whole:
            self._mark_cut(text)
        elif is_full:
            self._cut(len(self._window) - WINDOW_TOKENS, text)
        return self._without_prompts(delta)

    def flush(self) -> str:
        """Returns the rest: bytes of a character that never became whole."""
        text: str = self._vocabulary.decode(self._window) if self._window else ""
        rest = text[len(self._given) :]
        self._given = text
        return self._without_prompts(rest)

    def _without_prompts(self, delta: str) -> str:
        if delta and self._prompts:
            delta = delta.removeprefix(self._prompts)
            self._prompts = ""
        return delta

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
    """Finds the stop string that is complete first, however tokens cut the text. Linear in the text
    (KMP)."""

    __slots__ = ("_borders", "_held", "_keeps_stop", "_matched", "_stops", "found")

    def __init__(self, stops: tuple[str, ...], *, keeps_stop: bool = False) -> None:
        """`keeps_stop`: the text before a complete one ends with it."""
        self._stops = stops
        self._keeps_stop = keeps_stop
        self._borders = [_borders(stop) for stop in stops]
        self._matched = [0] * len(stops)
        """For each stop string, how much of its beginning ends the text."""
        self._held = ""
        self.found: str | None = None
        """The stop string that is complete."""

    def push(self, delta: str, *, may_stop: bool) -> tuple[str, bool]:
        """Text that can be no part of a stop string, and whether one is complete: then the text
        before it."""
        if not self._stops:
            return delta, False
        text = self._held + delta
        for position in range(len(self._held), len(text)):
            length = self._advance(text[position])
            if length and may_stop:
                self._held = ""
                end = position + 1
                self.found = text[end - length : end]
                return text[: end if self._keeps_stop else end - length], True
        num_held = max(self._matched)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], False

    def flush(self) -> str:
        """The text held back."""
        held = self._held
        self._held = ""
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
    """One job's text and end. `room` is what the context leaves after the prompt; of `prompt_ids`
    the last PROMPT_END_TOKENS count; without them some prompt is taken to be there.

    The EOS or stop token is an output token like any other, but has no text. A stop string is not
    part of the text. One that is a special token ends the completion at that token, which has no
    text for it to be found in. With `include_stop_str_in_output` the text ends with the stop string
    or with what the last token has of text.
    """

    __slots__ = (
        "_detokenizer",
        "_ends",
        "_finder",
        "_has_ended",
        "_includes_stop",
        "_is_cut",
        "_limit",
        "_limit_reason",
        "_min_tokens",
        "_num_tokens",
        "_parts",
        "_stop_ids",
        "_string_stop_ids",
        "_token_stop",
    )

    def __init__(
        self,
        vocabulary: Vocabulary,
        params: SamplingParams,
        *,
        room: int,
        prompt_ids: Sequence[int] | None = None,
    ) -> None:
        self._detokenizer = Detokenizer(
            vocabulary, prompt_ids=prompt_ids, with_special=not params.skip_special_tokens
        )
        self._includes_stop = params.include_stop_str_in_output
        self._finder = StopFinder(params.stop, keeps_stop=self._includes_stop)
        self._limit_reason = FinishReason.STOP if params.question else FinishReason.LENGTH
        """An answer to a question is whole with its one token."""
        self._limit = room if params.max_tokens is None else min(params.max_tokens, room)
        self._min_tokens = params.min_tokens
        self._stop_ids = params.stop_ids(vocabulary.eos_ids)
        # It is drawn where its grammar ends, before `min_tokens` only if it can only end.
        self._ends = vocabulary.eos_ids if params.structured_outputs is not None else frozenset()
        special = vocabulary.special_tokens
        # A template's line break behind such a token is no part of it.
        self._string_stop_ids = {
            special[stop.strip()]: stop for stop in params.stop if stop.strip() in special
        }
        self._token_stop: str | None = None
        """The stop string that is the last token."""
        self._num_tokens = 0
        self._has_ended = False
        self._is_cut = False
        """A stop string ended the text: what follows is dropped."""
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._parts)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; None when something else did, or nothing yet."""
        return self._finder.found or self._token_stop

    def push(self, token_id: int) -> tuple[str, FinishReason | None]:
        """The text that this token settles, and the reason if it is the last: then with all that
        was held back."""
        self._num_tokens += 1
        text = ""
        reason = None
        if self._is_stop(token_id):
            reason = FinishReason.STOP
            self._token_stop = self._string_stop_ids.get(token_id)
            if self._includes_stop:
                text = self._settle(self._detokenizer.push(token_id))
        else:
            text = self._settle(self._detokenizer.push(token_id))
            if self._is_cut:
                reason = FinishReason.STOP
            elif self._num_tokens >= self._limit:
                reason = self._limit_reason
        self._parts.append(text)
        self._has_ended = reason is not None
        return (text + self.flush() if self._has_ended else text), reason

    def say(self, ids: Iterable[int]) -> str:
        """The text that a head streams with these tokens, after those pushed before; nothing
        follows the end."""
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

    def _is_stop(self, token_id: int) -> bool:
        if token_id in self._ends:
            return True
        if token_id in self._stop_ids and self._num_tokens > self._min_tokens:
            return True
        return token_id in self._string_stop_ids and self._num_tokens >= self._min_tokens

    def _settle(self, delta: str) -> str:
        # Postgres has no NUL in texts: a result would differ from its stream.
        delta = delta.replace("\0", BROKEN)
        text, self._is_cut = self._finder.push(delta, may_stop=self._num_tokens >= self._min_tokens)
        return text
