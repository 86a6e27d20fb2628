"""Requests that found no room for their KV when they were claimed. Owns their line; knows no KV
block and no row.

Nothing of them is computed before Postgres knows that they begin, so a head that dies is no crash
of theirs.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardline_scheduler.kv_blocks import blocks_for
from shardline_scheduler.sequence import Sequence, WaitingQueue

RUNNING_PER_SPARE_BLOCK = 8
"""Admission leaves one block free for this many running sequences: a full pool would preempt what
it just admitted."""

MAX_LOOK_AHEAD = 16
"""Places behind a request that finds no room at which a smaller one is looked for."""


def spare_blocks(num_running: int) -> int:
    """Blocks that an admission leaves free."""
    return num_running // RUNNING_PER_SPARE_BLOCK


def fits(num_tokens: int, num_free: int, num_running: int) -> bool:
    """Whether there is room for one more with `num_tokens` known tokens."""
    return blocks_for(num_tokens) + spare_blocks(num_running) <= num_free


class Parking(WaitingQueue):
    """Keeps them in order, as all who wait."""

    def call(self, num_free: int, num_running: int, *, max_seats: int) -> Iterator[Sequence]:
        """Those that there is room for, each once. Smaller ones may pass one that finds none, but
        not for ever."""
        passed: list[Sequence] = []
        for sequence in self.first(MAX_LOOK_AHEAD, with_quarantined=True) if self else ():
            if num_running == max_seats:
                return
            if fits(len(sequence.ids), num_free, num_running):
                num_free = num_free - blocks_for(len(sequence.ids))
                num_running = num_running + 1
                if not sequence.called:
                    sequence.called = True
                    for overtaken in passed:
                        overtaken.patience -= 1
                    yield sequence
            elif sequence.patience <= 0:
                return
            else:
                passed.append(sequence)
