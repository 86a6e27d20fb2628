"""Which slot of states an open sequence has on this stage. Decides nothing: the scheduler opens no
more sequences than there are slots. Knows no torch."""

from __future__ import annotations

from shardline.base.errors import ProtocolError

NO_SLOT = -1


class Slots:
    """Slot numbers `0 … num - 1`; none on a stage without recurrent layers."""

    def __init__(self, num: int, *, are_used: bool) -> None:
        self._num = num
        self._are_used = are_used
        self.clear()

    @property
    def num_used(self) -> int:
        """Counts the slots that open sequences have."""
        return len(self._slots)

    def open(self, seq: int) -> None:
        """Gives a sequence a slot. Raises ProtocolError if none is left."""
        if not self._are_used:
            return
        if not self._free:
            raise ProtocolError(f"sequence {seq} finds none of {self._num} slots of states free")
        self._slots[seq] = self._free.pop()

    def of(self, seq: int) -> int:
        """Returns a sequence's slot; -1 where none are used."""
        return self._slots.get(seq, NO_SLOT)

    def close(self, seq: int) -> None:
        """Takes it back."""
        slot = self._slots.pop(seq, None)
        if slot is not None:
            self._free.append(slot)

    def clear(self) -> None:
        """Forgets all sequences."""
        self._free = list(range(self._num - 1, -1, -1))
        self._slots: dict[int, int] = {}
