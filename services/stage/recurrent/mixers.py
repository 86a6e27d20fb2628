"""Finds the recurrent modules of layers, and has them computed over packed rows. Knows no model by
name: a module is recognized by its parts, and what parts do not show is seen by the trial of the
model's miniature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from services.stage.recurrent.delta_rule import DeltaRule
from services.stage.recurrent.recurrence import Recurrence
from services.stage.recurrent.short_convolution import ShortConvolution
from services.stage.recurrent.state_space import StateSpace
from services.stage.recurrent.states import StateShapes

KINDS = (ShortConvolution, StateSpace, DeltaRule)


class Mixer(Protocol):
    """Computes one module of a layer."""

    shapes: StateShapes

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        """Maps hidden states [1, T, H] to [1, T, H] in one dtype, T packed rows, H the hidden
        size."""


def use_mixers(layers: Mapping[int, nn.Module]) -> Recurrence:
    """Gives the recurrent modules of these layers forwards over packed rows; returns what these
    share. Call it when no weight but those of linear layers will change any more."""
    recurrence = Recurrence()
    for number, layer in layers.items():
        for module in list(layer.modules()):
            mixer = _mixer(recurrence, module)
            if mixer is not None:
                replaced: Any = module
                replaced.forward = mixer.forward
                recurrence.shapes[number] = mixer.shapes
    return recurrence


def _mixer(recurrence: Recurrence, module: nn.Module) -> Mixer | None:
    kind = next((kind for kind in KINDS if kind.knows(module)), None)
    return None if kind is None else kind(recurrence, module)
