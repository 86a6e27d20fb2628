"""GELU in one pass over memory, where it gives the values of a model's own on trial rows.

Letters of shapes: T rows, N elements of a row.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from services.stage.kernels.kernel import DTYPES, Kernel
from services.stage.products.trial import agree, replace_children

TRIAL = torch.linspace(-12, 12, 481)[:, None]
"""Rows of one element each, to where a clipped activation differs."""
SMALL = 1e-5
"""Of what torch calls 0 we know a few digits."""
MOST = 0.99


class FusedGelu(nn.Module):
    """x times the normal distribution's share below x; or what approximates it by tanh."""

    def __init__(self, kernel: Kernel, *, uses_tanh: bool) -> None:
        super().__init__()
        self._kernel = kernel
        self.uses_tanh = uses_tanh

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [..., N] in float32, bfloat16 or float16 to the same shape and dtype, dense."""
        rows = x.reshape(-1, x.shape[-1])
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = x.new_empty(x.shape)
        sizes = (*rows.shape, rows.stride(0), self.uses_tanh)
        self._kernel.gelu(
            rows.data_ptr(), out.data_ptr(), *sizes, DTYPES[x.dtype], torch.get_num_threads()
        )
        return out


def fuse_gelus(model: nn.Module, kernel: Kernel) -> int:
    """Replaces the GELUs of a model that the kernel computes; returns how many."""
    return replace_children(model, partial(_fused, kernel))


def _fused(kernel: Kernel, module: nn.Module) -> FusedGelu | None:
    has_parts = next(module.children(), None) or next(module.parameters(), None) is not None
    if "gelu" not in type(module).__name__.lower() or has_parts:
        return None
    candidates = [FusedGelu(kernel, uses_tanh=uses_tanh) for uses_tanh in (False, True)]
    return next((each for each in candidates if _gives_the_same(each, module)), None)


def _gives_the_same(fused: FusedGelu, module: nn.Module) -> bool:
    """Only float32 tells tanh from the exact function. In a narrow dtype a module that rounds
    between its operations often gives another value."""
    narrow = TRIAL.bfloat16()
    equal = ((fused(narrow) - module(narrow)).abs() < SMALL).float().mean()
    return agree(fused(TRIAL), module(TRIAL)) and bool(equal > MOST)
