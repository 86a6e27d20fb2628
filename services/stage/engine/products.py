"""Finds every product of a loaded model whose number of rows matters, and gives each the panels that it may see.

Knows layers by their kind: linear ones, packed or plain, routers of mixtures, and experts. A weight of any other kind
is named, and the model is not exact.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from services.stage.engine.experts import expert_products, is_experts
from services.stage.engine.linear import PackedLinear
from services.stage.engine.padding import in_panels
from services.stage.engine.row_counts import SAMPLED_OUTPUTS, Product

log = structlog.get_logger(__name__)


def products(model: nn.Module) -> list[Product] | None:
    """All products of the model's own weights; None if it has a weight that this module does not know how to cut."""
    found: list[Product] = []
    for name, module in model.named_modules():
        if is_experts(module):
            found += expert_products(module)
        elif isinstance(module, PackedLinear):
            found.append(_packed(module))
        elif isinstance(module, nn.Linear | Conv1D):
            found.append(_plain(module))
        elif _is_router(module):
            found.append(_router(module))
        elif _matrices(module) and not isinstance(module, nn.Embedding):
            log.warning("a weight is multiplied in an unknown way", module=name, kind=type(module).__name__)
            return None
    return found


def settle(model: nn.Module, counts: tuple[int, ...]) -> None:
    """From now on no product of the model sees other numbers of rows than these."""
    module: Any
    for module in model.modules():
        if is_experts(module):
            module.counts = counts
        elif isinstance(module, PackedLinear):
            module.counts, module.sample = counts, None
        elif isinstance(module, nn.Linear | Conv1D):
            _cut(module, partial(_flat, module.forward, counts))
        elif _is_router(module):
            _cut(module, partial(_rows, module.forward, counts))


def _packed(layer: PackedLinear) -> Product:
    assert layer.sample is not None, "its rows were settled before"
    kind = "packed" if layer.bias is None else "packed with bias"
    return _product(layer.product, layer.sample, layer.out_features, kind)


def _plain(layer: nn.Linear | Conv1D) -> Product:
    if isinstance(layer, Conv1D):
        return _product(layer.forward, layer.weight.T, layer.nf, "transposed")
    return _product(layer.forward, layer.weight, layer.out_features, "plain" if layer.bias is None else "with bias")


def _router(module: Any) -> Product:
    weight: Tensor = module.weight
    return _product(module.forward, weight, weight.shape[0], type(module).__name__)


def _product(run: Callable[[Tensor], Any], weight: Tensor, outputs: int, kind: str) -> Product:
    sample = weight.detach()[:SAMPLED_OUTPUTS]
    return Product(run=run, width=weight.shape[1], outputs=outputs, dtype=weight.dtype, sample=sample, kind=kind)


def _matrices(module: nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters(recurse=False) if parameter.dim() > 1]


def _is_router(module: nn.Module) -> bool:
    """One weight [experts, width], nothing below, and one input: rows of hidden states."""
    if isinstance(module, nn.Embedding) or next(module.children(), None) is not None:
        return False
    inputs = inspect.signature(module.forward).parameters
    return _matrices(module) == ["weight"] and module.get_parameter("weight").dim() == 2 and len(inputs) == 1


def _cut(module: nn.Module, forward: Callable[[Tensor], Any]) -> None:
    module.forward = forward


def _flat(run: Callable[[Tensor], Tensor], counts: tuple[int, ...], x: Tensor) -> Tensor:
    out: Tensor = in_panels(run, x.reshape(-1, x.shape[-1]), counts)
    return out.reshape(*x.shape[:-1], -1)


def _rows(run: Callable[[Tensor], Any], counts: tuple[int, ...], x: Tensor) -> Any:
    return in_panels(run, x, counts)
