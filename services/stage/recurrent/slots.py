"""Which slot of states an open sequence has on this stage, and what is copied between slots.

Decides nothing and trusts no plan: the scheduler assigns slots to sequences and snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.stage.recurrent.states import RecurrentStates
from shardline.base.errors import ProtocolError
from shardline_scheduler.step_plan import NO_STATE, Open, Snapshot


class Slots:
    """The slots of open sequences, by their numbers; none on a stage without recurrent layers."""

    def __init__(self, states: RecurrentStates | None) -> None:
        self._states = states
        self._slots: dict[int, int] = {}

    @property
    def num_used(self) -> int:
        """Counts the slots that open sequences have."""
        return len(self._slots)

    def open(self, opened: Open) -> None:
        """Gives a sequence its slot, with the snapshot that it begins with. Raises ProtocolError if
        another one has the slot, or its state is not known."""
        if self._states is None:
            return
        self._check(opened.state)
        if (opened.snapshot == NO_STATE) != (opened.num_cached == 0):
            raise ProtocolError(
                f"sequence {opened.seq} opens with {opened.num_cached} tokens "
                f"and the state in slot {opened.snapshot}"
            )
        if opened.snapshot != NO_STATE:
            self._check(opened.snapshot)
            self._states.copy(opened.snapshot, opened.state)
        self._slots[opened.seq] = opened.state

    def of(self, seq: int) -> int:
        """Returns a sequence's slot; -1 where none are used."""
        return self._slots.get(seq, NO_STATE)

    def keep(self, snapshots: Iterable[Snapshot]) -> None:
        """Copies states of open sequences to slots that none has. Raises ProtocolError for
        others."""
        if self._states is None:
            return
        for each in snapshots:
            self._check(each.slot)
            if each.seq not in self._slots:
                raise ProtocolError(f"sequence {each.seq} has no state to keep")
            self._states.copy(self._slots[each.seq], each.slot)

    def close(self, seq: int) -> None:
        """Takes it back."""
        self._slots.pop(seq, None)

    def clear(self) -> None:
        """Forgets all sequences."""
        self._slots.clear()

    def _check(self, slot: int) -> None:
        num_slots = self._states.num_slots if self._states is not None else 0
        if not 0 <= slot < num_slots or slot in self._slots.values():
            raise ProtocolError(f"slot {slot} of {num_slots} states is used or does not exist")
