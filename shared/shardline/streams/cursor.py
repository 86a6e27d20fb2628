"""One reader's place in one job's output: it never repeats and never skips a token. Knows no
transport.

Deltas come from the stream as fast as they can; progress comes from Postgres when the stream has a
gap. Both are put in order here. What Postgres has is never taken back. What only a stream had may
be, when a head of another exactness goes on with the job: a reader that was given such tokens is
informed (`Diverged`), never given the others behind them.
"""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from shardline.base.errors import Diverged
from shardline.contract.job import JobProgress, JobState
from shardline.contract.wire import Delta

MAX_AHEAD = 4_096
"""Deltas kept while the gap before them is filled from Postgres."""

PLACE = re.compile(r"([0-9]{1,9})(?:-([0-9a-f]{8}))?", re.ASCII)

TextOf = Callable[[Sequence[int]], str]
"""The text that a head gives out with these tokens, which follow those of the calls before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Counts the output tokens that a reader knows; `digest` identifies them, if it kept that."""

    num_tokens: int = 0
    digest: int | None = 0

    def then(self, ids: Sequence[int]) -> Place:
        """Behind these tokens, which follow."""
        digest = None if self.digest is None else zlib.crc32(array("i", ids).tobytes(), self.digest)
        return Place(num_tokens=self.num_tokens + len(ids), digest=digest)

    @classmethod
    def parse(cls, text: str) -> Place | None:
        """What `str` wrote, or a number of tokens alone; None for anything else."""
        found = PLACE.fullmatch(text)
        if found is None:
            return None
        number = int(found[1])
        digest = found[2]
        return (
            cls(num_tokens=number, digest=int(digest, 16) if digest else None) if number else cls()
        )

    def __str__(self) -> str:
        """Returns it as readers of a stream send it back."""
        return (
            f"{self.num_tokens}-{self.digest:08x}"
            if self.num_tokens and self.digest is not None
            else f"{self.num_tokens}"
        )


class Cursor:
    """Feed it with `push` and `catch_up`, empty it with `take`.

    The tokens before `after` are known to the reader already. Without `text_of`, what was read from
    Postgres has its text only at the end.
    """

    def __init__(self, *, after: Place | None = None, text_of: TextOf | None = None) -> None:
        self.ended = False
        self.text_of = text_of
        self._after = after or Place()
        self._ids = array("i")
        """All known output tokens: what the reader has, then what came only from Postgres."""
        self._fence = 0
        """Of the newest attempt that was heard of."""
        self._num_saved = 0
        """This many are in Postgres and stay there."""
        self._num_checked = 0
        """This many are the newest attempt's too."""
        self._place = Place()
        """Behind the tokens that the reader has, or may take now."""
        self._num_said = 0
        """This many `text_of` has got."""
        self._num_chars = 0
        self._lost_text = False
        self._ready: list[Delta] = []
        self._ahead: dict[int, Delta] = {}

    def asked(self, *, only_learn: bool = False) -> tuple[int, int, int]:
        """What to read from Postgres, for `catch_up`: (fence, from which token on if that is still
        the newest attempt's, from which if it is not)."""
        limit = len(self._ids) if only_learn else self._next
        return self._fence, min(self._num_checked, limit), min(self._num_saved, limit)

    @property
    def num_unsaid(self) -> int:
        """Counts the tokens that `text_of` must get before it has text for more."""
        return self._next - self._num_said

    @property
    def has_gap(self) -> bool:
        """Tokens are missing that only Postgres can give."""
        return bool(self._ahead) and not self.ended

    def push(self, delta: Delta) -> None:
        """A delta from the stream: in order, repeated, ahead of a gap, of an attempt that is over.
        Raises Diverged."""
        self._sort_in(delta)
        self._use_ahead()

    def catch_up(self, progress: JobProgress, *, only_learn: bool = False) -> None:
        """Take in what Postgres answered to `asked`.

        With `only_learn` nothing is given out but the end: the stream has the tokens too, and with
        their text. Raises Diverged.
        """
        if self.ended:
            return
        start = progress.start
        ids = progress.token_ids
        state = progress.state
        if progress.fence != self._fence:
            self._begin_attempt(progress.fence)
        assert start <= len(self._ids), "rows were asked for from a place that is known"
        self._compare(start, ids)
        self._ids.extend(ids[len(self._ids) - start :])
        self._num_saved = max(self._num_saved, start + len(ids))
        self._num_checked = max(self._num_checked, self._num_saved)
        num_had = (
            len(self._ids)
            if self._after.digest is None
            else max(len(self._ids), self._after.num_tokens)
        )
        if state == JobState.SUCCEEDED and num_had > start + len(ids):
            raise Diverged(start + len(ids))
        if start <= self._next and (
            state is not None or not (only_learn or len(self._ids) <= self._next)
        ):
            self._give_saved(progress)
        self._use_ahead()

    def take(self) -> list[Delta]:
        """What the reader gets now, in order."""
        ready = self._ready
        self._ready = []
        return ready

    @property
    def _next(self) -> int:
        return self._place.num_tokens

    def _sort_in(self, delta: Delta) -> None:
        if self.ended:
            return
        if delta.fence < self._fence:
            # Of an attempt that is over: good where the newest one is known to have the same.
            if (
                delta.start != self._next
                or delta.next > self._num_checked
                or delta.state is not None
            ):
                return
            if self._differing(delta.start, delta.ids) is not None:
                return
        if delta.fence > self._fence:
            self._begin_attempt(delta.fence)
        if delta.start > min(self._num_checked, self._next):
            self._put_ahead(delta)
            return
        self._compare(delta.start, delta.ids)
        if delta.start == self._next and not self._needs_postgres(delta):
            self._ids.extend(delta.ids[len(self._ids) - delta.start :])
            self._accept(delta)
        elif delta.next > self._next or delta.state is not None:
            self._put_ahead(delta)
        self._num_checked = max(self._num_checked, min(delta.next, len(self._ids)))

    def _begin_attempt(self, fence: int) -> None:
        """It began with what was saved; what was streamed beyond that it streams again itself."""
        self._fence = fence
        self._num_checked = self._num_saved
        self._ahead.clear()

    def _compare(self, start: int, ids: Sequence[int]) -> None:
        if (place := self._differing(start, ids)) is not None:
            raise Diverged(place)

    def _differing(self, start: int, ids: Sequence[int]) -> int | None:
        known = self._ids[start : start + len(ids)]
        pairs = enumerate(zip(known, ids, strict=False), start)
        return next((place for place, (one, other) in pairs if one != other), None)

    def _put_ahead(self, delta: Delta) -> None:
        if len(self._ahead) >= MAX_AHEAD:
            self._ahead.clear()
        self._ahead[delta.start] = delta

    def _needs_postgres(self, delta: Delta) -> bool:
        """It holds tokens that the reader has, or it is the end and text before it is unknown."""
        return delta.start < self._after.num_tokens < delta.next or (
            self._lost_text and delta.state is not None
        )

    def _give_saved(self, progress: JobProgress) -> None:
        is_end = progress.state is not None
        text = progress.text
        logprobs = progress.logprobs
        if self._next < self._after.num_tokens and (
            is_end or self._after.num_tokens <= len(self._ids)
        ):
            self._skip_to_after()
        first = min(self._next, len(self._ids))
        new_text = self._say(len(self._ids)) if text is None else text[self._num_chars :]
        # of less than the reader has, text included
        if is_end and self._after.num_tokens > len(self._ids):
            new_text = ""
        self._lost_text = new_text is None
        self._accept(
            Delta(
                fence=self._fence,
                start=self._next,
                ids=tuple(self._ids[first:]),
                text=new_text or "",
                logprobs=logprobs[first - progress.start :] if logprobs else None,
                state=progress.state,
                finish_reason=progress.finish_reason,
            )
        )

    def _say(self, stop: int) -> str | None:
        """The text of the known tokens from `_next` to `stop`; None without `text_of`."""
        if self.text_of is None:
            return None
        if self._num_said < self._next:
            self.text_of(self._ids[self._num_said : self._next])
        self._num_said = stop
        return self.text_of(self._ids[self._next : stop])

    def _skip_to_after(self) -> None:
        """The reader's earlier connection gave it these."""
        place = min(self._after.num_tokens, len(self._ids))
        self._num_chars += len(self._say(place) or "")
        self._move_to(place)

    def _accept(self, delta: Delta) -> None:
        if self._lost_text:
            # Text with a hole in it would be wrong; the end brings all that is left.
            delta = msgspec.structs.replace(delta, text="")
        self._move_to(delta.next)
        self._num_chars += len(delta.text)
        self.ended = delta.state is not None
        if self.ended or (delta.ids and delta.next > self._after.num_tokens):
            self._ready.append(delta)

    def _move_to(self, place: int) -> None:
        """Raises Diverged when the reader's earlier connection gave it other tokens than these."""
        before = self._next
        self._place = self._place.then(self._ids[self._next : place])
        if before < self._after.num_tokens == place and self._after.digest not in (
            None,
            self._place.digest,
        ):
            raise Diverged(place)

    def _use_ahead(self) -> None:
        """Go on with what came before its turn; forget what Postgres has given meanwhile."""
        if not self.ended:
            for start in sorted(self._ahead):
                if start > min(self._next, self._num_checked):
                    break
                self._sort_in(self._ahead.pop(start))
