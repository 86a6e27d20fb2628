"""Attention with a bias by the distance between two tokens, learned for each head and shared by all
layers, through transformers' attention interface. Knows no model by name: MPNet is of this kind.

Letters of shapes: T packed rows, H heads, D the size of a head, N the hidden size.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from services.stage.attention.paged_kv import DistanceBias

MAKES_BIAS = "compute_position_bias"
WEIGHT = "relative_attention_bias"
"""The part with a number for each bucket of distances and each head."""
PRODUCTS = ("q", "k", "v", "o")
PADDING = 1
"""The id behind which such models count positions; their config's value has no effect."""


def biases_by_distance(kind: Any) -> bool:
    """Returns whether the modeling file of this class has such attention."""
    names = vars(sys.modules[kind.__module__]).values()
    return any(inspect.isclass(each) and hasattr(each, MAKES_BIAS) for each in names)


def use_distance_bias(base: nn.Module, layers: Any, config: Any) -> None:
    """Gives the attention of these layers a forward over packed rows, where the model's own makes a
    bias of all rows by all rows."""
    owner: Any = next((each for each in base.modules() if hasattr(each, MAKES_BIAS)), None)
    if owner is None:
        return
    setattr(owner, MAKES_BIAS, lambda *_, **__: None)
    table = BiasTable(owner, config.max_position_embeddings)
    for number, layer in enumerate(layers):
        for module in layer.modules():
            if all(hasattr(module, name) for name in PRODUCTS):
                module.layer_idx = number
                module.forward = BiasedAttention(module, config, table).forward


class BiasTable:
    """The bias of every distance, read from the weight when it is first asked for."""

    def __init__(self, owner: Any, num_positions: int) -> None:
        self._owner = owner
        self._num_positions = num_positions
        self._found: DistanceBias | None = None

    def get(self) -> DistanceBias:
        """Returns the table, on the device of the weight."""
        if self._found is None:
            weight: Tensor = getattr(self._owner, WEIGHT).weight
            reach = self._num_positions - 1
            distances = torch.arange(-reach, reach + 1, device=weight.device)
            rows = weight.detach()[self._owner.relative_position_bucket(distances)]
            self._found = DistanceBias.of(rows.T.float())
        return self._found


class BiasedAttention:
    """The forward of an attention module with the products q, k, v and o."""

    def __init__(self, module: Any, config: Any, table: BiasTable) -> None:
        self._module = module
        self._config = config
        self._table = table

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> tuple[Tensor]:
        """Maps hidden states [1, T, N] to [1, T, N], in one dtype."""
        module = self._module
        shape = (*hidden_states.shape[:-1], -1, module.attention_head_size)
        query, key, value = (
            getattr(module, name)(hidden_states).view(shape).transpose(1, 2)
            for name in PRODUCTS[:3]
        )
        name = self._config._attn_implementation  # noqa: SLF001 (as transformers' own modules read it)
        attend = ALL_ATTENTION_FUNCTIONS[name]
        out, _weights = attend(
            module, query, key, value, None, is_causal=False, distance_bias=self._table.get()
        )
        return (module.o(out.flatten(2)),)
