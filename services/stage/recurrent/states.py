"""The states that recurrent layers keep for sequences: a slot of a fixed size for each sequence, in
every layer. Owns their memory; knows no model.

A sequence that begins finds its slot empty whatever was in it, so a slot is never cleared. Letters
of shapes: S slots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from services.stage.attention.paged_kv import MicroBatch
from shardline.base.errors import ProtocolError
from shardline_scheduler.step_plan import NO_STATE


class StateShape(NamedTuple):
    """One part of what a layer keeps for a sequence."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Returns the memory of a slot."""
        return math.prod(self.sizes) * self.dtype.itemsize


StateShapes = tuple[StateShape, ...]
"""All that one layer keeps for a sequence."""


def bytes_per_slot(layers: Mapping[int, StateShapes]) -> int:
    """Returns the memory that one sequence takes over all these layers."""
    return sum(shape.num_bytes for shapes in layers.values() for shape in shapes)


class RecurrentStates:
    """The states of one stage, allocated and touched once, so that memory never runs out later."""

    def __init__(
        self,
        layers: Mapping[int, StateShapes],
        num_slots: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_slots = num_slots
        self.num_bytes = num_slots * bytes_per_slot(layers)
        self.of_layer: dict[int, tuple[Tensor, ...]] = {
            layer: tuple(
                torch.zeros(num_slots, *shape.sizes, dtype=shape.dtype, device=device)
                for shape in shapes
            )
            for layer, shapes in layers.items()
        }
        """By layer, each [S, ...]."""

    def copy(self, source: int, target: int) -> None:
        """Copies what all layers keep in one slot to another."""
        for tensors in self.of_layer.values():
            for tensor in tensors:
                tensor[target].copy_(tensor[source])


class StateRows:
    """The rows of a step by sequence, as `Recurrence` needs them."""

    def __init__(self, micro_batch: MicroBatch, num_slots: int) -> None:
        """Raises ProtocolError for a slot that does not exist, or that two sequences have."""
        spans = micro_batch.spans
        self.spans = spans
        self.slots = [span.state for span in spans]
        if len(set(self.slots)) < len(spans) or not all(0 <= s < num_slots for s in self.slots):
            unknown = "none" if NO_STATE in self.slots else str(sorted(self.slots))
            raise ProtocolError(f"slots of states {unknown}, of {num_slots}")
        self.begins = [0]
        for span in spans:
            self.begins.append(self.begins[-1] + span.length)
        numbers = [self.begins, self.slots, [int(span.start == 0) for span in spans]]
        self.tensors = [torch.tensor(each, dtype=torch.int32) for each in numbers]
        """Where each sequence's rows begin, and the end of the last, int32 [spans + 1]; its slot,
        and whether it begins here, int32 [spans]; on the CPU."""

    @property
    def num_rows(self) -> int:
        """Counts the rows, without padding."""
        return self.begins[-1]
