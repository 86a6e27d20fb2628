"""Experts of a mixture whose arithmetic for a row does not depend on the batch: each expert sees at least `MIN_ROWS`.

Registered with transformers as an experts implementation. Knows no model: sizes and flags come from its module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ExpertsInterface

from services.stage.engine.padding import padded_rows

EXPERTS = "shardline_padded"
MIN_ROWS = 16
"""Fewer rows would take other matrix kernels, with other bits. The probe at start checks that this is enough."""


def padded_experts(module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Each chosen expert over its rows, padded to MIN_ROWS; sums in order of the experts' numbers, in float32."""
    total = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    sizes = {module.down_proj.shape[-2], module.down_proj.shape[-1]}
    widths, num_threads = frozenset(int(size) for size in sizes), torch.get_num_threads()
    for expert in torch.unique(top_k_index).tolist():
        if expert >= module.num_experts:
            continue
        rows, place = torch.where(top_k_index == expert)
        num = rows.numel()
        padded = padded_rows(num, min_rows=MIN_ROWS, widths=widths, num_threads=num_threads)
        states = hidden.new_zeros(padded, hidden.shape[-1])
        states[:num] = hidden[rows]
        out = _one_expert(module, expert, states)[:num]
        total.index_add_(0, rows, (out * top_k_weights[rows, place, None]).float())
    return total.to(hidden.dtype)


def _one_expert(module: Any, expert: int, states: Tensor) -> Tensor:
    up = "gate_up_proj" if module.has_gate else "up_proj"
    inner = _linear(module, up, expert, states)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)  # noqa: SLF001 (transformers' seam)
    out = _linear(module, "down_proj", expert, inner)
    return module.post_expert_norm(out) if getattr(module, "has_post_expert_norm", False) else out


def _linear(module: nn.Module, name: str, expert: int, states: Tensor) -> Tensor:
    weight: Tensor = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if getattr(module, "has_bias", False) else None
    return functional.linear(states, weight.t() if getattr(module, "is_transposed", False) else weight, bias)


ExpertsInterface.register(EXPERTS, padded_experts)
