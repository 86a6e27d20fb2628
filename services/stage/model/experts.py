"""Experts of a mixture whose arithmetic for a row does not depend on the batch: each expert's rows are padded and cut.

Registered with transformers as an experts implementation. Knows no model: sizes and flags come from its module.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ExpertsInterface

from services.stage.model.row_buckets import RUNGS, Ladder, Panels, in_panels
from services.stage.model.row_counts import SAMPLED_OUTPUTS, Product

EXPERTS = "shardline_padded"
WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
"""[experts, ...] each; a module has the first or the second."""


def is_experts(module: nn.Module) -> bool:
    """Whether transformers calls `padded_experts` for it."""
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return hasattr(module, "has_gate") and chosen == EXPERTS  # transformers marks its classes of experts so


def expert_products(module: Any) -> list[Product]:
    """One for each weight: all experts' are of one shape."""
    found = []
    for name in WEIGHTS:
        if (stacked := getattr(module, name, None)) is None:
            continue
        weight = stacked[0].T if getattr(module, "is_transposed", False) else stacked[0]
        found.append(
            Product(
                run=partial(_product, module, name, 0),
                settle=partial(_settle, module, name),
                width=weight.shape[1],
                outputs=weight.shape[0],
                dtype=weight.dtype,
                sample=weight[:SAMPLED_OUTPUTS],
                kind=f"{type(module).__name__}.{name}",
            )
        )
    return found


def padded_experts(module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Each chosen expert over its rows, padded; sums in order of the experts' numbers, in float32."""
    total = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    sizes = {int(size) for size in module.down_proj.shape[-2:]}
    ladders = frozenset(_ladder(module, name) for name in WEIGHTS if hasattr(module, name))
    panels = Panels(ladders=ladders, widths=frozenset(sizes), num_threads=torch.get_num_threads())
    for expert in torch.unique(top_k_index).tolist():
        if expert >= module.num_experts:
            continue
        rows, place = torch.where(top_k_index == expert)
        num = rows.numel()
        states = hidden.new_zeros(panels.padded(num), hidden.shape[-1])
        states[:num] = hidden[rows]
        out = _one_expert(module, expert, states)[:num]
        total.index_add_(0, rows, (out * top_k_weights[rows, place, None]).float())
    return total.to(hidden.dtype)


def _one_expert(module: Any, expert: int, states: Tensor) -> Tensor:
    up, down = ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"
    inner = in_panels(partial(_product, module, up, expert), states, _ladder(module, up))
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)  # noqa: SLF001 (transformers' seam)
    out: Tensor = in_panels(partial(_product, module, down, expert), inner, _ladder(module, down))
    return module.post_expert_norm(out) if getattr(module, "has_post_expert_norm", False) else out


def _product(module: nn.Module, name: str, expert: int, states: Tensor) -> Tensor:
    weight: Tensor = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if getattr(module, "has_bias", False) else None
    return functional.linear(states, weight.t() if getattr(module, "is_transposed", False) else weight, bias)


def _settle(module: nn.Module, name: str, ladder: Ladder) -> None:
    setattr(module, f"{name}_ladder", ladder)


def _ladder(module: nn.Module, name: str) -> Ladder:
    ladder: Ladder = getattr(module, f"{name}_ladder", RUNGS)
    return ladder


ExpertsInterface.register(EXPERTS, padded_experts)
