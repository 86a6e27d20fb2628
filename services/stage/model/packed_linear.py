"""Linear layers on CPU with weights packed by oneDNN, which see only the numbers of rows in their buckets.

Uses torch's private mkldnn operators: without them, layers stay as they are. Knows no model.

Letters of shapes: T rows, K inputs and N outputs of a layer. Tensors are float32 or bfloat16, as the weight is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from services.stage.model.row_buckets import Buckets, in_panels
from services.stage.model.row_counts import SAMPLED_OUTPUTS

_reorder = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_has_bfloat16 = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)

_EXPECTED_ROWS = 32
"""oneDNN picks its layout for this number of rows. From 2 to 512 the same speed was measured."""


class PackedLinear(nn.Module):
    """A linear layer whose weight is stored in oneDNN's layout; the original is not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        assert _reorder is not None, "ask can_pack first"
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed = _reorder(weight.detach().contiguous(), _EXPECTED_ROWS)
        self.sample: Tensor | None = weight.detach()[:SAMPLED_OUTPUTS].clone()
        """Some rows [S, K] of the weight, kept until its buckets are known."""
        self._buckets: Buckets = ()
        self._empty = torch.empty(0, dtype=weight.dtype)

    @property
    def weight(self) -> Tensor:
        """An empty tensor [0] of the weight's dtype: some models ask a weight for its dtype or device."""
        return self._empty

    def forward(self, x: Tensor) -> Tensor:
        """Returns x @ weight.T + bias: x [..., T, K] to [..., T, N], in the weight's dtype."""
        rows = x if x.numel() == x.shape[-2] * x.shape[-1] else x.reshape(-1, x.shape[-1])
        out: Tensor = in_panels(self.product, rows, self._buckets)
        return out if rows is x else out.reshape(*x.shape[:-1], -1)

    def use_buckets(self, buckets: Buckets) -> None:
        """Makes `forward` run only these numbers of rows from now on."""
        self._buckets, self.sample = buckets, None

    def product(self, x: Tensor) -> Tensor:
        """Returns x @ weight.T + bias in one call, whatever the number of rows: x [..., T, K] to [..., T, N], in the
        weight's dtype."""
        assert _linear is not None, "ask can_pack first"
        return _linear(x, self.packed, self.bias, "none", [], "")


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch and this processor run packed linear layers of `dtype`."""
    if _reorder is None or _linear is None or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and _has_bfloat16 is not None and bool(_has_bfloat16()))
