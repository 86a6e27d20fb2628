"""Finds every product of a loaded model for which the number of rows matters, and how to give it
its row buckets.

Knows linear layers, routers of mixtures, and experts. A weight of any other kind is named in the
log, and the model is not exact. Knows no shard and no attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from services.stage.products.experts import expert_products, is_experts
from services.stage.products.module_failures import FAILURES
from services.stage.products.row_buckets import Buckets, in_panels
from services.stage.products.row_counts import SAMPLED_OUTPUTS, Product, Run
from services.stage.products.tiled_linear import Int8Embedding, TiledEmbedding, TiledLinear

log = structlog.get_logger(__name__)


def products(model: nn.Module) -> tuple[list[Product], bool]:
    """Returns the products of the model's weights for which the number of rows matters, and whether
    these are all.

    They are not if the model has a weight that this module cannot cut into panels.
    """
    found: list[Product] = []
    are_all = True
    for name, module in model.named_modules():
        if is_experts(module):
            found += expert_products(module)
        elif isinstance(module, TiledLinear | Int8Embedding | TiledEmbedding):
            continue  # exact for any number of rows
        elif type(module) in {nn.Linear, Conv1D}:
            found.append(_plain(module))
        elif _is_router(module):
            found.append(_router(module))
        elif _is_scale(module):
            continue  # a norm with weights for each head: no sum is over what rows decide
        elif _matrices(module) and not isinstance(module, nn.Embedding):
            log.warning(
                "a weight is multiplied in an unknown way", module=name, kind=type(module).__name__
            )
            are_all = False
    return found, are_all


def _plain(layer: nn.Linear | Conv1D) -> Product:
    use_buckets = partial(_use_buckets, layer, _flat)
    if isinstance(layer, Conv1D):
        return _product(layer.forward, layer.weight.T, layer.nf, "transposed", use_buckets)
    kind = "plain" if layer.bias is None else "with bias"
    return _product(layer.forward, layer.weight, layer.out_features, kind, use_buckets)


def _router(module: Any) -> Product:
    weight: Tensor = module.weight
    return _product(
        module.forward,
        weight,
        weight.shape[0],
        type(module).__name__,
        partial(_use_buckets, module, in_panels),
    )


def _product(
    run: Run, weight: Tensor, outputs: int, kind: str, use_buckets: Callable[[Buckets], None]
) -> Product:
    sample = weight.detach()[:SAMPLED_OUTPUTS]
    width = weight.shape[1]
    dtype = weight.dtype
    return Product(
        run=run,
        use_buckets=use_buckets,
        width=width,
        outputs=outputs,
        dtype=dtype,
        sample=sample,
        kind=kind,
    )


def _matrices(module: nn.Module) -> list[str]:
    return [
        name for name, parameter in module.named_parameters(recurse=False) if parameter.dim() > 1
    ]


def _is_router(module: nn.Module) -> bool:
    """Whether the module has one weight [experts, width], no children, and one input: rows of
    hidden states."""
    if isinstance(module, nn.Embedding) or next(module.children(), None) is not None:
        return False
    inputs = inspect.signature(module.forward).parameters
    if (
        _matrices(module) != ["weight"]
        or module.get_parameter("weight").dim() != 2
        or len(inputs) != 1
    ):
        return False
    outputs, width = module.get_parameter("weight").shape
    return _takes(module, (outputs + 1, width))


def _is_scale(module: nn.Module) -> bool:
    """Whether the module's one weight of some dimensions is multiplied with the last dimensions of
    its one input."""
    if _matrices(module) != ["weight"] or len(inspect.signature(module.forward).parameters) != 1:
        return False
    return _takes(module, (2, *module.get_parameter("weight").shape))


@torch.no_grad()
def _takes(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether the module takes an input of this shape."""
    try:
        module(module.get_parameter("weight").new_zeros(shape))
    except FAILURES:
        return False
    return True


def _use_buckets(
    module: nn.Module, run_in_panels: Callable[[Run, Tensor, Buckets], Any], buckets: Buckets
) -> None:
    run = module.forward
    module.forward = lambda x: run_in_panels(run, x, buckets)


def _flat(run: Run, x: Tensor, buckets: Buckets) -> Tensor:
    out: Tensor = in_panels(run, x.reshape(-1, x.shape[-1]), buckets)
    return out.reshape(*x.shape[:-1], -1)
