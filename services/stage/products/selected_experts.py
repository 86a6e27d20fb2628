"""Mixtures that compute all their experts for every row, most of them with zeros: here each expert
computes the rows that chose it. Knows no model by name: a mixture is recognized by its parts.

Letters of shapes: T rows, H the hidden size, E experts, I the width of one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from services.stage.products.experts import EXPERTS, padded_experts

PARTS = ("router", "experts", "shared_expert")


def select_experts(model: nn.Module) -> None:
    """Has such mixtures of a model compute chosen experts alone, by `padded_experts`."""
    for module in list(model.modules()):
        if all(hasattr(module, name) for name in PARTS) and _has_stacked(module.experts):
            _mark(module.experts)
            replaced: Any = module
            replaced.forward = _forward(module)


def _has_stacked(experts: Any) -> bool:
    """Whether they are weights [E, H, 2 * I] and [E, I, H] of a class that transformers does not
    call through its interface of experts."""
    weights = [getattr(experts, name, None) for name in ("gate_up_proj", "down_proj")]
    are_stacked = all(isinstance(weight, Tensor) and weight.dim() == 3 for weight in weights)
    return are_stacked and not hasattr(experts, "has_gate")


def _mark(experts: Any) -> None:
    """Gives experts the words by which `padded_experts` reads them."""
    act_fn: Callable[[Tensor], Tensor] = experts.act_fn

    def gated(inner: Tensor) -> Tensor:
        gate, up = inner.chunk(2, dim=-1)
        return up * act_fn(gate)

    experts.config = SimpleNamespace(_experts_implementation=EXPERTS)
    experts.has_gate = True
    experts.has_bias = False
    experts.is_transposed = True
    experts.weighs_inputs = True
    experts._apply_gate = gated  # noqa: SLF001 (the hook of transformers' experts)


def _forward(mixture: Any) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Maps hidden states [..., H] to [T, H], and the logits [T, E] of the router."""
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, logits = mixture.router(hidden)
        chosen_logits, chosen = torch.topk(logits, mixture.top_k, dim=1)
        weights = chosen_logits.float().sigmoid().to(logits.dtype)
        out = mixture.shared_expert(hidden)
        return out + padded_experts(mixture.experts, hidden, chosen, weights), logits

    return forward
