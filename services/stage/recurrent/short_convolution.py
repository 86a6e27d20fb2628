"""LFM2's mixer: a short convolution between two gates.

Letters of shapes: T packed rows, H the hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from services.stage.products.trial import child_names
from services.stage.recurrent.convolution import Convolution
from services.stage.recurrent.recurrence import Recurrence
from services.stage.recurrent.states import StateShapes


class ShortConvolution:
    """Computes a module with `in_proj`, `conv` and `out_proj`, which stay where they are."""

    def __init__(self, recurrence: Recurrence, module: Any) -> None:
        self._recurrence = recurrence
        self._module = module
        self._convolution = Convolution(recurrence, module, "conv", activates=False)
        self.shapes: StateShapes = (self._convolution.shape,)

    @staticmethod
    def knows(module: Any) -> bool:
        """Returns whether a module of transformers has the parts, and no others."""
        return child_names(module) == {"in_proj", "conv", "out_proj"}

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        """Maps hidden states [1, T, H] to [1, T, H], in the dtype of the weights."""
        if not self._recurrence.is_bound:
            return hidden_states.new_zeros(hidden_states.shape)
        before, after, x = self._module.in_proj(hidden_states)[0].chunk(3, dim=-1)
        (state,) = self._recurrence.states(self._module.layer_idx)
        mixed: Tensor = self._module.out_proj(self._convolution(state, x, before, after)[None])
        return mixed
