"""One reader's place in one job's output: it never repeats and never skips a token. Knows no transport.

Deltas come from the stream as fast as they can; progress comes from Postgres when the stream has a gap. Both are put
in order here. A stream's entries are trusted only where `start == next`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from shardline.job import TokenLogprob
from shardline.wire import Delta

MAX_AHEAD = 4_096
"""Deltas kept while the gap before them is filled from Postgres."""

TextOf = Callable[[Sequence[int]], str]
"""The text that a head has given out once it has generated these tokens."""


class Cursor:
    """Feed it with `push` and `catch_up`, empty it with `take`.

    `after` output tokens are known to the reader already. Without `text_of`, what was read from Postgres has its text
    only at the end.
    """

    def __init__(self, *, after: int = 0, text_of: TextOf | None = None) -> None:
        self.ended = False
        self._after = after
        self._text_of = text_of
        self._next = 0
        self._num_chars = 0
        self._lost_text = False
        self._ready: list[Delta] = []
        self._ahead: dict[int, Delta] = {}

    @property
    def next(self) -> int:
        """Output tokens that the reader has, or may take now."""
        return max(self._next, self._after)

    @property
    def has_gap(self) -> bool:
        """Tokens are missing that only Postgres can give."""
        return bool(self._ahead) and not self.ended

    def push(self, delta: Delta) -> None:
        """A delta from the stream: in order, repeated, or ahead of a gap."""
        if self.ended:
            return
        if delta.start == self._next and not self._needs_postgres(delta):
            self._accept(delta)
            self._use_ahead()
        elif delta.next > self._next or delta.state is not None:
            if len(self._ahead) >= MAX_AHEAD:
                self._ahead.clear()
            self._ahead[delta.start] = delta

    def catch_up(
        self,
        ids: Sequence[int],
        *,
        fence: int = 0,
        logprobs: Sequence[TokenLogprob] | None = None,
        text: str | None = None,
        state: str | None = None,
        finish_reason: str | None = None,
    ) -> None:
        """All output tokens that Postgres has. `state`, with the final `text`, only once the job has ended."""
        if self.ended or (len(ids) <= self._next and state is None):
            return
        if self._next < self._after and (self._after <= len(ids) or state is not None):
            self._skip_to_after(ids)
        start = min(self._next, len(ids))
        if text is None and self._text_of is not None:
            text = self._text_of(ids)
        self._lost_text = text is None
        self._accept(
            Delta(
                fence=fence,
                start=start,
                ids=tuple(ids[start:]),
                text=(text or "")[self._num_chars :],
                logprobs=tuple(logprobs[start:]) if logprobs else None,
                state=state,
                finish_reason=finish_reason,
            )
        )
        self._use_ahead()

    def take(self) -> list[Delta]:
        """What the reader gets now, in order."""
        ready, self._ready = self._ready, []
        return ready

    def _needs_postgres(self, delta: Delta) -> bool:
        """It holds tokens that the reader has, or it is the end and text before it is unknown."""
        return delta.start < self._after < delta.next or (self._lost_text and delta.state is not None)

    def _accept(self, delta: Delta) -> None:
        if self._lost_text:
            # Text with a hole in it would be wrong; the end brings all that is left.
            delta = msgspec.structs.replace(delta, text="")
        self._next = delta.next
        self._num_chars += len(delta.text)
        self.ended = delta.state is not None
        if self.ended or (delta.ids and delta.next > self._after):
            self._ready.append(delta)

    def _skip_to_after(self, ids: Sequence[int]) -> None:
        """The reader's earlier connection gave it these."""
        self._next = min(self._after, len(ids))
        if self._text_of is not None:
            self._num_chars = len(self._text_of(ids[: self._next]))

    def _use_ahead(self) -> None:
        """Go on with what came before its turn; forget what Postgres has given meanwhile."""
        while (delta := self._ahead.get(self._next)) is not None and not self.ended:
            if self._needs_postgres(delta):
                break
            self._accept(self._ahead.pop(self._next))
        self._ahead = {start: delta for start, delta in self._ahead.items() if start >= self._next and not self.ended}
