"""Parts of ours in place of a model's, where both give the same on trial rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

NUM_ROWS = 33
MAX_ROUNDINGS = 4
"""The largest difference accepted in a trial, in roundings of the largest value. Another
activation, or a norm without its offset, differs by hundreds."""


def trial_rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns drawn values in `dtype`, the same every time: [1, *shape], or [1, NUM_ROWS, N] for
    one size N."""
    rows = (1, *shape) if len(shape) > 1 else (1, NUM_ROWS, *shape)
    return torch.randn(rows, generator=torch.Generator().manual_seed(sum(rows))).to(dtype)


def agree(ours: Tensor, theirs: Tensor) -> bool:
    """Returns whether two results [...] of any float dtype are equal but for roundings: sums run in
    another order, and e^x has another last bit."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    apart = (ours.float() - theirs.float()).abs().max()
    return bool(apart <= MAX_ROUNDINGS * torch.finfo(ours.dtype).eps * theirs.float().abs().max())


def child_names(module: nn.Module) -> set[str]:
    """Returns the names of a module's own parts."""
    return {name for name, _ in module.named_children()}


def replace_children(model: nn.Module, fused: Callable[[nn.Module], nn.Module | None]) -> int:
    """Replaces each module within a model by what `fused` makes of it, if that is one; returns how
    many."""
    num_replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (replacement := fused(child)) is not None:
                setattr(parent, name, replacement)
                num_replaced += 1
    return num_replaced
