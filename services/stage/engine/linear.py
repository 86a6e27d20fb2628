"""Linears in oneDNN's own weight layout: two to three times as fast on a CPU. Knows no model.

Also the probe of rule 2: below some number of rows, matrix libraries take other kernels, with other bits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from services.stage.engine.resident import give_back

ROWS_HINT = 32
"""The layout is chosen for about so many rows; any number works."""
ROWS_TRIED = (1, 2, 3, 4, 8, 16)
MANY_ROWS = 64


class PackedLinear(nn.Module):
    """A linear whose weight only oneDNN can read."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._dtype = linear.weight.dtype
        weight = linear.weight.detach().contiguous()
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)  # noqa: SLF001 (no public one)
        self._run = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001

    @property
    def weight(self) -> Tensor:
        """For models that ask for its dtype."""
        return torch.empty(0, dtype=self._dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x · Wᵀ + b."""
        out: Tensor = self._run(x, self._packed, self.bias, "none", [], "")
        return out


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN serves this dtype on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    has_bf16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001
    return dtype == torch.float32 or (dtype == torch.bfloat16 and has_bf16)


def pack(model: nn.Module) -> None:
    """Replaces every plain linear on the CPU, one by one: at no time do two copies of more than one exist."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child.weight.device.type == "cpu" and can_pack(child.weight.dtype):
                setattr(module, name, PackedLinear(child))
                give_back(child.weight)


def min_rows(model: nn.Module) -> int:
    """The fewest rows from which each linear gives a row the same bits in any batch; at most the last of ROWS_TRIED."""
    shapes = {
        (type(module), module.in_features, module.out_features): module
        for module in model.modules()
        if isinstance(module, nn.Linear | PackedLinear)
    }
    return max((_min_rows(linear) for linear in shapes.values()), default=1)


def _min_rows(linear: nn.Linear | PackedLinear) -> int:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(MANY_ROWS, linear.in_features, generator=generator)
    x = x.to(device=linear.weight.device, dtype=linear.weight.dtype)
    expected = linear(x)
    return next((rows for rows in ROWS_TRIED if _agrees(linear, x, expected, rows)), ROWS_TRIED[-1])


def _agrees(linear: nn.Linear | PackedLinear, x: Tensor, expected: Tensor, rows: int) -> bool:
    return all(torch.equal(linear(x[:more]), expected[:more]) for more in (rows, rows + 1, 2 * rows - 1))
