"""Experts of a mixture with arithmetic for a row that does not depend on other rows: each is packed
by our own products, or its rows are padded and cut.

Registered with transformers as an experts implementation. Knows no model: sizes and flags come from
its module.

Letters of shapes: T rows, H the hidden size, C experts chosen per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ExpertsInterface

from services.stage.products.row_buckets import ROW_BUCKETS, Buckets, RowPadding, in_panels
from services.stage.products.row_counts import SAMPLED_OUTPUTS, Product
from services.stage.products.stored import keep, stored_of

EXPERTS = "shardline_padded"
WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
"""Attributes that hold the weights of all experts: stacked in a tensor [experts, ...], or packed as
one layer for each. A module has either the first or the second."""


def is_experts(module: nn.Module) -> bool:
    """Whether transformers calls `padded_experts` for this module."""
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    # the attribute marks transformers' experts classes
    return hasattr(module, "has_gate") and chosen == EXPERTS


def stacked_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields names and tensors [experts, ...], of any float dtype, of the weights that are not
    packed."""
    for name in WEIGHTS:
        if isinstance(stacked := getattr(module, name, None), Tensor):
            yield name, stacked


def pack_experts(module: Any, make: Callable[[Tensor, Tensor | None], nn.Module]) -> None:
    """Replaces the stacked weights by a layer for each expert, which `make` makes of a weight [N,
    K], which may stand for a stored one, and a bias [N].

    All have one dtype. A row's bits must not depend on the other rows of such a layer.
    """
    for name, stacked in list(stacked_weights(module)):
        layers = [make(*_parameters(module, name, expert)) for expert in range(len(stacked))]
        delattr(module, name)
        setattr(module, name, nn.ModuleList(layers))
        _use_buckets(module, name, ())


def expert_products(module: Any) -> list[Product]:
    """Returns one product for each stacked weight: the weights of all experts have the same
    shape."""
    found = []
    for name, stacked in stacked_weights(module):
        weight, _ = _parameters(module, name, 0)
        found.append(
            Product(
                run=partial(_product, module, name, 0),
                use_buckets=partial(_use_buckets, module, name),
                width=weight.shape[1],
                outputs=weight.shape[0],
                dtype=stacked.dtype,
                sample=weight[:SAMPLED_OUTPUTS],
                kind=f"{type(module).__name__}.{name}",
            )
        )
    return found


def padded_experts(
    module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Runs each chosen expert over its rows, padded; sums the experts' outputs in order of their
    numbers, in float32.

    Takes hidden states [T, H], `top_k_index` int64 [T, C] and `top_k_weights` [T, C] of any float
    dtype; returns [T, H] in the dtype of `hidden`. An index of `num_experts` or more chooses no
    expert.
    """
    total = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    buckets = frozenset(_buckets(module, name) for name in WEIGHTS if hasattr(module, name))
    padding = RowPadding(
        buckets=buckets, widths=_widths(module), num_threads=torch.get_num_threads()
    )
    weighs_inputs = getattr(module, "weighs_inputs", False)
    for expert in torch.unique(top_k_index).tolist():
        if expert >= module.num_experts:
            continue
        rows, choice = torch.where(top_k_index == expert)
        num = rows.numel()
        states = hidden.new_zeros(padding.padded(num), hidden.shape[-1])
        weights = top_k_weights[rows, choice, None]
        states[:num] = hidden[rows] * weights if weighs_inputs else hidden[rows]
        out = _one_expert(module, expert, states)[:num]
        total.index_add_(0, rows, (out if weighs_inputs else out * weights).float())
    return total.to(hidden.dtype)


def _one_expert(module: Any, expert: int, states: Tensor) -> Tensor:
    up = "gate_up_proj" if module.has_gate else "up_proj"
    down = "down_proj"
    inner = in_panels(partial(_product, module, up, expert), states, _buckets(module, up))
    gate = module._apply_gate if module.has_gate else module.act_fn  # noqa: SLF001 (its own hook)
    inner = gate(inner)
    out: Tensor = in_panels(partial(_product, module, down, expert), inner, _buckets(module, down))
    return module.post_expert_norm(out) if getattr(module, "has_post_expert_norm", False) else out


def _product(module: Any, name: str, expert: int, states: Tensor) -> Tensor:
    packed = getattr(module, name)
    if isinstance(packed, nn.ModuleList):
        out: Tensor = packed[expert](states)
        return out
    return functional.linear(states, *_parameters(module, name, expert))


def _parameters(module: Any, name: str, expert: int) -> tuple[Tensor, Tensor | None]:
    """The stacked weight [N, K], which may stand for a stored one, and bias [N] of one expert."""
    stacked: Tensor = getattr(module, name)
    weight = stacked[expert].t() if getattr(module, "is_transposed", False) else stacked[expert]
    bias = getattr(module, f"{name}_bias")[expert] if getattr(module, "has_bias", False) else None
    if (stored := stored_of(stacked)) is not None:
        keep(weight, stored.rows(range(expert * len(weight), (expert + 1) * len(weight))))
    return weight, bias


def _widths(module: Any) -> frozenset[int]:
    """The row lengths of the elementwise operations inside and behind an expert."""
    packed: Any = module.down_proj
    if isinstance(packed, nn.ModuleList):
        layer: Any = packed[0]
        return frozenset({layer.in_features, layer.out_features})
    return frozenset(packed.shape[-2:])


def _use_buckets(module: nn.Module, name: str, buckets: Buckets) -> None:
    setattr(module, f"{name}_buckets", buckets)


def _buckets(module: nn.Module, name: str) -> Buckets:
    buckets: Buckets = getattr(module, f"{name}_buckets", ROW_BUCKETS)
    return buckets


ExpertsInterface.register(EXPERTS, padded_experts)
