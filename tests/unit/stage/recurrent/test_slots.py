"""Each open sequence has a slot of its own, which another finds when it is closed."""

from __future__ import annotations

import pytest

from services.stage.recurrent.slots import NO_SLOT, Slots
from shardline.base.errors import ProtocolError


def test_a_closed_sequence_gives_its_slot_back() -> None:
    slots = Slots(2, are_used=True)
    slots.open(7)
    slots.open(8)
    with pytest.raises(ProtocolError, match="sequence 9 finds none of 2"):
        slots.open(9)

    own = slots.of(7)
    slots.close(7)
    slots.open(9)

    assert slots.of(9) == own
    assert (slots.of(7), slots.num_used) == (NO_SLOT, 2)


def test_a_stage_without_recurrent_layers_gives_none() -> None:
    slots = Slots(0, are_used=False)
    slots.open(7)
    slots.close(7)
    assert (slots.of(7), slots.num_used) == (NO_SLOT, 0)
