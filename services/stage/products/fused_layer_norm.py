"""LayerNorm in one pass over memory, where it gives the values of torch's on trial rows.

Letters of shapes: T rows, D the size of a normalized row.
"""

from __future__ import annotations

from ctypes import byref
from functools import partial

import torch
from torch import Tensor, nn

from services.stage.kernels.kernel import DTYPES, Kernel, LayerNorm
from services.stage.products.trial import agree, replace_children, trial_rows


class FusedLayerNorm(nn.Module):
    """(x - mean(x)) / deviation(x) * weight + bias over the last dimension."""

    def __init__(self, kernel: Kernel, norm: nn.LayerNorm) -> None:
        super().__init__()
        self._kernel = kernel
        weight = norm.weight.detach()
        bias = torch.zeros_like(weight) if norm.bias is None else norm.bias.detach()
        self.register_buffer("scale", weight.float().contiguous())
        self.register_buffer("offset", bias.float().contiguous())
        self.weight = weight.new_empty(0)
        """Some models ask a norm's weight for its dtype."""
        self.norm = LayerNorm(self.scale.data_ptr(), self.offset.data_ptr(), norm.eps)
        """As the kernel reads it."""

    scale: Tensor
    offset: Tensor
    """float32 [D] in every model."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes x [..., D] in float32, bfloat16 or float16; returns the same shape and
        dtype."""
        x = x.contiguous()
        out = torch.empty_like(x)
        dim = x.shape[-1]
        sizes = (x.numel() // dim, dim, DTYPES[x.dtype], torch.get_num_threads())
        self._kernel.layer_norm(x.data_ptr(), None, byref(self.norm), out.data_ptr(), *sizes)
        return out


def fuse_layer_norms(model: nn.Module, kernel: Kernel) -> int:
    """Replaces the LayerNorms of a model that the kernel computes; returns how many. Call it when
    no weight will move any more."""
    return replace_children(model, partial(_fused, kernel))


def _fused(kernel: Kernel, module: nn.Module) -> FusedLayerNorm | None:
    if (
        type(module) is not nn.LayerNorm
        or len(module.normalized_shape) != 1
        or not isinstance(module.weight, Tensor)
        or module.weight.dtype not in DTYPES
    ):
        return None
    fused = FusedLayerNorm(kernel, module)
    x = trial_rows(module.normalized_shape[0], dtype=module.weight.dtype)
    return fused if agree(fused(x), module(x)) else None
