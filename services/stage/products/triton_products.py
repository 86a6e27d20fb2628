"""Linear layers and RMSNorms on GPUs through our Triton kernels: a row's bits depend on that row
only.

Owns tile sizes and launch settings, none of which depends on a call's rows: they decide bits. Knows
no model.

Letters of shapes: T rows, K inputs and N outputs of a layer, D the width of a normalized row.
Tensors are float32, bfloat16 or float16.
"""

from __future__ import annotations

import structlog
from torch import Tensor, nn

from services.stage.kernels.triton_loader import TritonKernels
from shardline.base.rounding import ceil_div

log = structlog.get_logger(__name__)

KERNELS = "services.stage.products.triton_kernels"

ROWS = {2: 64, 4: 16}
"""Rows of a tile by the bytes of an element. One shape serves one decode row and a prefill. 64 in
16-bit dtypes: such a tile asks some 64 operations of each byte of weights, which matrix units do
while memory brings the next, and a prefill of 256 rows reads weights four times, not sixteen. Few
GPUs have matrix units that keep float32's precision: 16."""
OUTPUTS = 64
"""A decode step has one program for each 64 outputs: a layer 4,096 wide keeps 64 multiprocessors
busy. Fewer outputs would ask more reads of x from each prefill."""
INPUT_BYTES = 128
"""Of an output's weights in a step of a sum: one line of a cache."""
LAUNCH = {"num_warps": 4, "num_stages": 3}
"""Tiles of three steps are 48 KiB at most, which any program may hold."""
NORM_VALUES_PER_WARP = 512
MAX_NORM_WARPS = 8
ALIGNMENT = 16
"""Bytes: what triton calls aligned."""


class TritonLinear(nn.Module):
    """A linear layer over the weight that it was given: a dense one is not copied, and a tied one
    stays tied."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Takes a weight [N, K] and its bias [N], in one of the three dtypes."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._kernels = TritonKernels.load(KERNELS, __file__)
        self.register_buffer("weight", dense(weight.detach()))
        self.register_buffer("bias", None if bias is None else dense(bias.detach()))

    weight: Tensor
    """[N, K] in the dtype of inputs and outputs."""
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Returns x @ weight.T + bias: x [..., T, K] to [..., T, N], in the dtype of `weight`."""
        rows = dense(x.reshape(-1, self.in_features))
        out = rows.new_empty(len(rows), self.out_features)
        size = rows.element_size()
        num_rows = len(rows)
        self._kernels.module.multiply[
            ceil_div(num_rows, ROWS[size]), ceil_div(self.out_features, OUTPUTS)
        ](
            rows,
            self.weight,
            self.weight if self.bias is None else self.bias,
            out,
            num_rows,
            N=self.out_features,
            K=self.in_features,
            HAS_BIAS=self.bias is not None,
            ROWS=ROWS[size],
            OUTPUTS=OUTPUTS,
            INPUTS=INPUT_BYTES // size,
            IS_INTERPRETED=self._kernels.is_interpreted,
            **LAUNCH,
        )
        return out.reshape(*x.shape[:-1], self.out_features)


class TritonRmsNorm(nn.Module):
    """RMSNorm with a program for each row: x / rms(x) * weight over the last dimension."""

    def __init__(self, weight: Tensor, eps: float, rounds_first: bool) -> None:
        """Takes a weight [D] of any float dtype, with its offset included. With `rounds_first`, x /
        rms(x) is rounded to x's dtype before it is weighted."""
        super().__init__()
        self._kernels = TritonKernels.load(KERNELS, __file__)
        self.register_buffer("scale", weight.detach().float().contiguous())
        self._eps = eps
        self._rounds_first = rounds_first

    scale: Tensor
    """float32 [D] in every model: the norm's weight, its offset included."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes x [..., D] of any of the three dtypes; returns the same shape and dtype."""
        width = len(self.scale)
        rows = dense(x.reshape(-1, width))
        out = rows.new_empty(rows.shape)
        padded = 1 << (width - 1).bit_length()
        num_warps = min(
            MAX_NORM_WARPS, 1 << (ceil_div(padded, NORM_VALUES_PER_WARP) - 1).bit_length()
        )
        self._kernels.module.rms_norm[(len(rows),)](
            rows,
            self.scale,
            out,
            self._eps,
            WIDTH=width,
            PADDED_WIDTH=padded,
            ROUNDS_FIRST=self._rounds_first,
            num_warps=num_warps,
        )
        return out.reshape(x.shape)


def dense(tensor: Tensor) -> Tensor:
    """Returns a tensor [...] of any dtype that is contiguous and begins at an aligned address:
    itself, or a copy.

    Memory comes from torch's allocators, which align more than triton asks for.
    """
    is_aligned = tensor.storage_offset() * tensor.element_size() % ALIGNMENT == 0
    return tensor if is_aligned and tensor.is_contiguous() else tensor.clone().contiguous()


def kernel_version() -> str:
    """Returns a name that changes whenever the bits of a row may change."""
    return TritonKernels.load(KERNELS, __file__).version


def are_covered(model: nn.Module) -> bool:
    """Whether our kernels, or a lookup, compute all that has weights or normalizes; otherwise the
    log names the rest.

    What else a model computes with torch, only the probe of sequences sees.
    """
    left = sorted({type(module).__name__ for module in model.modules() if not _is_covered(module)})
    if left:
        log.info("torch computes parts whose bits may depend on other rows", parts=left)
    return not left


def _is_covered(module: nn.Module) -> bool:
    if isinstance(module, TritonLinear | TritonRmsNorm):
        return True
    has_matrices = any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    return "Norm" not in type(module).__name__ and (
        not has_matrices or isinstance(module, nn.Embedding)
    )
