"""Offload: full KV blocks of preempted sequences, copied to slots outside the pool when their
memory is needed.

As with blocks, the head alone decides and stages only index: a slot is a number that every stage
has. A slot belongs to the tokens of a block and lives as long as a preempted sequence waits for
them. Knows no torch and no step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardline_scheduler.sequence import Sequence
from shardline_scheduler.step_plan import Move


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadTerms:
    """What the stages of a pipeline offer: `num_slots` is the minimum over them, `move_s` the
    maximum."""

    num_slots: int = 0
    move_s: float = 0.0
    """Seconds that a block takes to its slot and back."""


NO_OFFLOAD = OffloadTerms()


@dataclass(slots=True)
class Slot:
    """Holds one block's content, or waits for it."""

    number: int
    num_waiting: int = 0
    """Sequences that it is kept for."""
    is_filled: bool = False


class Offload:
    """Slot numbers `0 … num_slots - 1` and the moves that the next plan is to carry."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[bytes, Slot] = {}
        self._waiting: dict[Sequence, list[bytes]] = {}
        self._moves: list[Move] = []

    @property
    def num_used(self) -> int:
        """Slots that are kept for a sequence, filled or not."""
        return len(self._slots)

    def keep(self, sequence: Sequence, names: Iterable[bytes]) -> None:
        """Gives slots to the blocks of a preempted sequence, the first ones first: later ones are
        found behind them only. A block is copied once another sequence takes its memory."""
        assert sequence not in self._waiting, f"{sequence.request.key} was preempted twice"
        kept = self._waiting[sequence] = []
        for name in names:
            if name not in self._slots:
                if not self._free:
                    break
                self._slots[name] = Slot(self._free.pop())
            self._slots[name].num_waiting += 1
            kept.append(name)

    def drop(self, sequence: Sequence) -> None:
        """It is back, or ended."""
        for name in self._waiting.pop(sequence, ()):
            slot = self._slots[name]
            slot.num_waiting -= 1
            if not slot.num_waiting:
                self._free.append(slot.number)
                del self._slots[name]

    def holds(self, name: bytes) -> bool:
        """Whether a slot has this content."""
        return name in self._slots and self._slots[name].is_filled

    def evict(self, block: int, name: bytes) -> None:
        """The pool gives the block's memory to another sequence."""
        slot = self._slots.get(name)
        if slot is not None and not slot.is_filled:
            slot.is_filled = True
            self._moves.append(Move(block, slot.number, is_out=True))

    def restore(self, name: bytes, block: int) -> None:
        """Fills a block with content that a slot `holds`."""
        self._moves.append(Move(block, self._slots[name].number, is_out=False))

    def forget(self, names: Iterable[bytes]) -> None:
        """Forgets content that no sequence is to find."""
        for name in names:
            if name in self._slots:
                self._slots[name].is_filled = False

    def take_moves(self) -> tuple[Move, ...]:
        """What every stage does before the next step, in this order: a slot and a block may come up
        twice."""
        moves = tuple(self._moves)
        self._moves = []
        return moves
