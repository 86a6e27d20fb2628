"""Slots of what recurrent layers keep: who has which. Each open sequence has one; the others hold
snapshots, which later sequences with the same first tokens begin with.

As with blocks, the head alone decides and stages only index. A snapshot is found by the digest of a
block: it is the state behind the block's last token. Knows no torch and no step.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardline_scheduler.step_plan import NO_STATE


class StatePool:
    """Slot numbers `0 … num_slots - 1`; none: no layer is recurrent. Snapshots have what sequences
    leave, and the one that was not used for longest goes first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._of: dict[int, int] = {}
        """By the number of an open sequence."""
        self._snapshots: dict[bytes, int] = {}
        """Longest unused first."""

    @property
    def num_snapshots(self) -> int:
        """Counts the slots that hold one."""
        return len(self._snapshots)

    def holds(self, name: bytes) -> bool:
        """Whether there is a snapshot of this name."""
        return name in self._snapshots

    def open(self, number: int, name: bytes | None) -> tuple[int, int]:
        """Gives an opening sequence a slot. Returns it, and the slot of the snapshot `name` that it
        begins with: its own, if no other is left."""
        source = NO_STATE
        if name is not None:
            source = self._snapshots.pop(name)
            self._snapshots[name] = source
        assert self._free or self._snapshots, f"sequence {number} finds no slot for its state"
        slot = self._free.pop() if self._free else self._evict()
        self._of[number] = slot
        return slot, source

    def keep(self, name: bytes, instead_of: bytes | None) -> int | None:
        """Returns a slot for a snapshot, if need be that of another one; None: there is one of this
        name, or sequences have all slots. The snapshot `instead_of` goes first."""
        if name in self._snapshots:
            self._snapshots[name] = self._snapshots.pop(name)
            return None
        if instead_of is not None:
            self.forget([instead_of])
        if not self._free and not self._snapshots:
            return None
        self._snapshots[name] = slot = self._free.pop() if self._free else self._evict()
        return slot

    def forget(self, names: Iterable[bytes]) -> None:
        """Forgets snapshots that no sequence is to find."""
        for name in names:
            if (slot := self._snapshots.pop(name, None)) is not None:
                self._free.append(slot)

    def close(self, numbers: Iterable[int]) -> None:
        """The plan that closes these sequences is made: later ones may use their slots."""
        for number in numbers:
            if (slot := self._of.pop(number, None)) is not None:
                self._free.append(slot)

    def _evict(self) -> int:
        return self._snapshots.pop(next(iter(self._snapshots)))
