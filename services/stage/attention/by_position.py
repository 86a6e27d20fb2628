"""What some models do by a mask, or count from the beginning of a batch: packed rows have no mask,
and each has a position in its sequence. Knows no model by name: a module is recognized by its
parts."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CHUNKED = "chunked_attention"
"""The type, in a config, of layers whose rows see the keys of one chunk of the sequence."""

WINDOW_MASK = "create_sliding_window_causal_mask"
"""What the code of a model imports that has a window in its mask."""


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """Scales queries by the logarithm of their positions, in steps, so that attention over long
    contexts stays sharp (arXiv 2501.19399)."""

    step: float
    """Positions between two changes."""
    gain: float

    def scaled(self, query: Tensor, position: Tensor) -> Tensor:
        """Takes queries [1, H, T, D] in any float dtype and positions int32 [T]; returns them
        scaled."""
        steps = torch.floor((position.float() + 1.0) / self.step)
        scales = torch.log1p(steps) * self.gain + 1.0
        return (query * scales[:, None]).to(query.dtype)


def count_by_rows(layers: Iterable[nn.Module]) -> None:
    """Gives the attention modules of these layers the attributes `attention_chunk`,
    `sliding_window` and `query_temperature`, which `Attention.attend` applies, and stops them from
    scaling queries."""
    modules: list[Any] = [module for layer in layers for module in layer.modules()]
    for module in modules:
        if _is_chunked(module):
            module.attention_chunk = module.config.attention_chunk_size
        if _is_masked_to_a_window(module):
            module.sliding_window = module.config.sliding_window
        if _has_temperature(module):
            module.query_temperature = QueryTemperature(module.floor_scale, module.attn_scale)
            module.attn_temperature_tuning = False


def _is_chunked(module: Any) -> bool:
    kinds = getattr(getattr(module, "config", None), "layer_types", None) or ()
    number = getattr(module, "layer_idx", None)
    return number is not None and number < len(kinds) and kinds[number] == CHUNKED


def _is_masked_to_a_window(module: Any) -> bool:
    """Whether the mask alone would apply the window of the config, as in Phi-3.5-MoE. Configs of
    others may have one that no code reads."""
    config = getattr(module, "config", None)
    return (
        hasattr(module, "layer_idx")
        and not hasattr(module, "sliding_window")
        and hasattr(sys.modules[type(module).__module__], WINDOW_MASK)
        and not getattr(config, "layer_types", None)
        and hasattr(config, "sliding_window")
    )


def _has_temperature(module: Any) -> bool:
    return bool(getattr(module, "attn_temperature_tuning", False)) and not module.use_rope
