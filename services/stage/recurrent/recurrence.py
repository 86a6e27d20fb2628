"""The recurrent layers of one shard: their states, and the rows of the step that they compute.

Through the CPU kernels where there are some: token by token from the state that the token before
left, so a row's bits depend on its sequence alone. Else through torch, which promises no bits.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from services.stage.attention.paged_kv import MicroBatch
from services.stage.kernels import recurrent_calls as calls
from services.stage.kernels.kernel import Kernel
from services.stage.recurrent.states import RecurrentStates, StateRows, StateShapes


class Recurrence:
    """What mixers share. Used by one thread: it gets the micro-batch before the model runs."""

    def __init__(self) -> None:
        self.kernel: Kernel | None = None
        self.has_kernels = True
        """Whether the kernels have the sizes of all layers."""
        self.shapes: dict[int, StateShapes] = {}
        """By layer; empty: no layer of the shard is recurrent."""
        self._states: RecurrentStates | None = None
        self._rows: StateRows | None = None

    @property
    def is_bound(self) -> bool:
        """Whether there are states; without some mixers return zeros, which a probe needs."""
        return self._states is not None

    @property
    def is_torchs(self) -> bool:
        """Whether torch computes some recurrent layer: rows may then have other bits."""
        return bool(self.shapes) and (self.kernel is None or not self.has_kernels)

    @property
    def rows(self) -> StateRows:
        """Returns the rows of this step."""
        assert self._rows is not None, "a micro-batch is set before the model runs"
        return self._rows

    def bind(self, states: RecurrentStates) -> None:
        """Makes `states` those that sequences keep."""
        self._states = states

    def use(self, micro_batch: MicroBatch) -> None:
        """Sets the rows of the next forward. Raises ProtocolError for slots that do not exist."""
        if self._states is not None and self.shapes:
            self._rows = StateRows(micro_batch, self._states.num_slots)

    def states(self, layer: int) -> tuple[Tensor, ...]:
        """Returns what a layer keeps, each [slots, ...], in the dtypes of its shapes."""
        assert self._states is not None, "states are bound before the model runs"
        return self._states.of_layer[layer]

    def call_rows(self) -> calls.StateRows:
        """Returns the rows as the kernel reads them."""
        begins, slots, is_new = self.rows.tensors
        pointers = begins.data_ptr(), slots.data_ptr(), is_new.data_ptr()
        return calls.StateRows(*pointers, len(slots), torch.get_num_threads())

    def each_sequence(self, state: Tensor) -> list[tuple[slice, Tensor]]:
        """Returns for each sequence its rows and its part of a state [slots, ...] of any dtype,
        which is empty where it begins and may be changed in place: for what has no kernel."""
        found: list[tuple[slice, Tensor]] = []
        rows = self.rows
        for span, begin in zip(rows.spans, rows.begins, strict=False):
            own = state[span.state]
            if span.start == 0:
                own.zero_()
            found.append((slice(begin, begin + span.length), own))
        return found


def run(function: Any, call: ctypes.Structure) -> None:
    """Calls a function of the kernel."""
    status: int = function(ctypes.byref(call))
    assert status == 0, f"the kernel does not know the sizes of {type(call).__name__}"


def pointer(tensor: Tensor | None) -> int | None:
    """Returns the address of a tensor [...] of any dtype; of none, null."""
    return None if tensor is None else tensor.data_ptr()


def stored(weight: Tensor) -> Tensor:
    """Returns a copy of a weight [...] of any float dtype as the kernels read it: float32,
    dense."""
    return weight.detach().to(torch.float32, copy=True).contiguous()
