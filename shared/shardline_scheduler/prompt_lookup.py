"""Prompt lookup: drafts what followed the last tokens of a sequence where they stood before, in its
prompt or output.

A draft is a guess. The sampler decides whether it comes true: a wrong one costs rows of a step,
never a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import takewhile

WINDOW = 16_384
"""Tokens before the first look that are indexed: memory stays bounded, and a first look takes some
5 ms at most."""
MAX_PLACES = 8
"""Earlier places that are compared, the latest first."""
MIN_MATCH = 2
MAX_MATCH = 16
"""Tokens before a place that are compared. More add nothing new."""
MAX_MISSES = 6


class PromptLookup:
    """The index of one sequence, which only ever grows: O(1) for each, and nothing until it is
    asked.

    A match of n tokens is worth 2 n drafts, so a copy is followed in ever longer runs; where it
    differs by a token, behind that. Each look in a row of which no draft came true asks for a match
    one token longer, and two of them end a copy: text without repetition is left alone.
    """

    __slots__ = ("_before", "_distance", "_first", "_latest", "_misses")

    def __init__(self) -> None:
        self._first = 0
        self._latest: dict[tuple[int, int], int] = {}
        """The latest place behind each pair of tokens."""
        self._before: list[int] = []
        """For each place from `_first` on, the one before it behind the same pair; 0: none."""
        self._misses = 0
        self._distance = 0
        """From the text that is being copied to the end, in tokens; 0: there is none."""

    def draft(self, ids: list[int], most: int) -> tuple[int, ...]:
        """Returns at most `most` guesses of the tokens that follow `ids`."""
        if most < 1 or len(ids) <= MIN_MATCH:
            return ()
        self._index(ids)
        # The latest of those that match best.
        place = max(self._places(ids), key=partial(_match, ids), default=0)
        size = _match(ids, place)
        if size < MIN_MATCH + self._misses:
            if not self._distance:
                return ()
            place = len(ids) - self._distance
            size = MIN_MATCH
        self._distance = len(ids) - place
        return _copy(ids, place, min(most, 2 * size))

    def learn(self, num_accepted: int) -> None:
        """Learns how many of the last drafts came true."""
        self._misses = 0 if num_accepted else min(MAX_MISSES, self._misses + 1)
        if self._misses > 1:
            self._distance = 0

    def _index(self, ids: list[int]) -> None:
        if not self._before:
            self._first = max(MIN_MATCH, len(ids) - WINDOW)
        for place in range(self._first + len(self._before), len(ids)):
            pair = ids[place - 2], ids[place - 1]
            self._before.append(self._latest.get(pair, 0))
            self._latest[pair] = place

    def _places(self, ids: list[int]) -> Iterator[int]:
        """Yields where the last two tokens stood before, the latest first: each is the place behind
        them."""
        place = self._latest.get((ids[-2], ids[-1]), 0)
        for _ in range(MAX_PLACES):
            if not place:
                return
            yield place
            place = self._before[place - self._first]


def _match(ids: list[int], place: int) -> int:
    """How many tokens before `place` are those at the end."""
    sizes = range(1, min(MAX_MATCH, place) + 1)
    return sum(1 for _ in takewhile(lambda size: ids[place - size] == ids[-size], sizes))


def _copy(ids: list[int], place: int, num: int) -> tuple[int, ...]:
    """What followed at `place`; past the end, what is copied there: a text that goes in circles
    goes on in them."""
    copied: list[int] = []
    for source in range(place, place + num):
        copied.append(ids[source] if source < len(ids) else copied[source - len(ids)])
    return tuple(copied)
