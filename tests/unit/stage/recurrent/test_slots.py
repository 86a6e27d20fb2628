"""Each open sequence has the slot that its plan names, begins with the snapshot that it names, and
what does not fit is refused."""

from __future__ import annotations

import pytest
import torch

from services.stage.recurrent.slots import Slots
from services.stage.recurrent.states import RecurrentStates, StateShape
from shardline.base.errors import ProtocolError
from shardline.contract.job import SamplingParams
from shardline_scheduler.step_plan import NO_STATE, Open, Snapshot

SHAPES = {3: (StateShape((2, 3), torch.float32), StateShape((4,), torch.bfloat16))}


def opened(seq: int, state: int, snapshot: int = NO_STATE, num_cached: int = 0) -> Open:
    return Open(
        seq=seq,
        ids=(5,) * 100,
        num_prompt=100,
        params=SamplingParams(),
        seed=1,
        num_blocks=2,
        num_cached=num_cached,
        state=state,
        snapshot=snapshot,
    )


def states_of(num_slots: int) -> RecurrentStates:
    """Slots in which each number is the slot's."""
    states = RecurrentStates(SHAPES, num_slots)
    for tensor in states.of_layer[3]:
        for slot in range(num_slots):
            tensor[slot] = slot
    return states


def content(states: RecurrentStates) -> list[list[float]]:
    """What all parts of each slot hold."""
    return [tensor.flatten(1)[:, 0].tolist() for tensor in states.of_layer[3]]


def test_a_closed_sequence_gives_its_slot_back() -> None:
    slots = Slots(states_of(2))
    slots.open(opened(7, 1))
    with pytest.raises(ProtocolError, match="slot 1 of 2 states is used or does not exist"):
        slots.open(opened(8, 1))

    slots.close(7)
    slots.open(opened(9, 1))

    assert (slots.of(9), slots.of(7), slots.num_used) == (1, NO_STATE, 1)


def test_snapshots_are_copied_in_all_layers() -> None:
    states = states_of(4)
    slots = Slots(states)

    slots.open(opened(7, 1, snapshot=3, num_cached=64))
    slots.keep([Snapshot(7, 0)])
    slots.open(opened(8, 2, snapshot=2, num_cached=64))

    assert content(states) == [[3.0, 3.0, 2.0, 3.0]] * 2


@pytest.mark.parametrize(
    "wrong",
    [
        opened(8, 4),
        opened(8, NO_STATE),
        opened(8, 2, snapshot=1),
        opened(8, 2, num_cached=64),
        opened(8, 2, snapshot=0, num_cached=64),
        opened(8, 2, snapshot=4, num_cached=64),
    ],
)
def test_a_slot_that_does_not_fit_is_refused(wrong: Open) -> None:
    slots = Slots(states_of(4))
    slots.open(opened(7, 0))

    with pytest.raises(ProtocolError):
        slots.open(wrong)


@pytest.mark.parametrize("wrong", [Snapshot(7, 0), Snapshot(7, 4), Snapshot(8, 1)])
def test_a_snapshot_that_does_not_fit_is_refused(wrong: Snapshot) -> None:
    slots = Slots(states_of(4))
    slots.open(opened(7, 0))

    with pytest.raises(ProtocolError):
        slots.keep([wrong])


def test_a_stage_without_recurrent_layers_has_none() -> None:
    slots = Slots(None)
    slots.open(opened(7, 2, snapshot=1, num_cached=64))
    slots.keep([Snapshot(7, 0)])
    slots.close(7)

    assert (slots.of(7), slots.num_used) == (NO_STATE, 0)
