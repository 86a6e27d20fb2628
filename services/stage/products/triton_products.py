"""Linear layers, RMSNorms and elementwise parts on GPUs through our Triton kernels: a row's bits
depend on that row only.

Owns tile sizes and launch settings. Knows no model.

Letters of shapes: T rows, K inputs and N outputs of a layer, D the width of a normalized row.
Tensors are float32, bfloat16 or float16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import structlog
import torch
from torch import Tensor, nn

from services.stage.kernels.kernel import GateActivation
from services.stage.kernels.triton_loader import TritonKernels
from shardline.base.rounding import ceil_div

log = structlog.get_logger(__name__)

KERNELS = "services.stage.products.triton_kernels"


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program of a product computes, and how. Rows and outputs do not decide bits: each
    sum runs in the same order in every tile."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int
    """Steps of a sum that are fetched ahead; fewer where memory is short."""


FEW_ROWS = Tile(rows=64, outputs=32, num_warps=4, num_stages=8)
"""Of 16-bit dtypes. A decode reads weights and computes little: many programs with few outputs each
keep memory busy. On an H200 it takes 1.05 to 1.2 times as long as cuBLAS at 1 and at 64 rows."""
LARGER = (
    Tile(rows=128, outputs=128, num_warps=8, num_stages=3),
    Tile(rows=64, outputs=64, num_warps=4, num_stages=6),
)
"""Of 16-bit dtypes, for more rows: each reads weights and inputs less often, if there are programs
enough. On an H200 they take 1.0 to 1.7 times as long as cuBLAS at 96 to 1,024 rows, where FEW_ROWS
takes up to 3.6."""
MANY_PROGRAMS = 128
"""About the number of multiprocessors of a large GPU."""
WIDE = Tile(rows=16, outputs=64, num_warps=4, num_stages=3)
"""Of float32: few GPUs have matrix units that keep its precision."""
INPUT_BYTES = 128
"""Of an output's weights in a step of a sum: one line of a cache."""
LEAST_SHARED_BYTES = 48 << 10
"""What any program may hold."""
NORM_VALUES_PER_WARP = 512
MAX_NORM_WARPS = 8
COLUMNS = 1024
HEADS = 8
"""Of a program of an elementwise part."""
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
        tile = tile_of(num_rows, self.out_features, size)
        self._kernels.module.multiply[
            ceil_div(num_rows, tile.rows), ceil_div(self.out_features, tile.outputs)
        ](
            rows,
            self.weight,
            self.weight if self.bias is None else self.bias,
            out,
            num_rows,
            N=self.out_features,
            K=self.in_features,
            HAS_BIAS=self.bias is not None,
            ROWS=tile.rows,
            OUTPUTS=tile.outputs,
            INPUTS=INPUT_BYTES // size,
            IS_INTERPRETED=self._kernels.is_interpreted,
            num_warps=tile.num_warps,
            num_stages=stages_of(tile, shared_bytes(rows.device)),
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


class TritonParts:
    """The elementwise parts of a model on a GPU."""

    rotates_all = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kernels = TritonKernels.load(KERNELS, __file__)

    def norm(self, weight: Tensor, eps: float, rounds_first: bool) -> nn.Module:
        """Returns an RMSNorm of a weight [D] of any float dtype."""
        return TritonRmsNorm(weight, eps, rounds_first)

    def gate_mul(self, gate: Tensor, up: Tensor, activation: GateActivation) -> Tensor:
        """Returns silu(gate) * up, dense: all [T, N] of one dtype, rows any distance apart."""
        assert activation is GateActivation.SILU, "GELUs are torch's on a GPU"
        num_rows, width = gate.shape
        out = gate.new_empty(num_rows, width)
        self._kernels.module.silu_mul[num_rows, ceil_div(width, COLUMNS)](
            gate,
            up,
            out,
            WIDTH=width,
            GATE_ROW=gate.stride(0),
            UP_ROW=up.stride(0),
            COLUMNS=COLUMNS,
        )
        return out

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, *, neighbors: bool) -> Tensor:
        """Rotates the halves of x [1, H, T, D], the heads of a token adjacent in memory, by dense
        cos and sin [1, T, D] of its dtype; returns a view of memory [1, T, H, D]."""
        assert not neighbors, "those are torch's on a GPU"
        _, num_heads, num_rows, dim = x.shape
        out = x.new_empty(1, num_rows, num_heads, dim)
        self._kernels.module.rotate[num_rows, ceil_div(num_heads, HEADS)](
            x,
            cos,
            sin,
            out,
            NUM_HEADS=num_heads,
            HALF=dim // 2,
            PADDED_HALF=1 << (dim // 2 - 1).bit_length(),
            X_ROW=x.stride(2),
            HEADS=HEADS,
        )
        return out.transpose(1, 2)


def tile_of(num_rows: int, num_outputs: int, element_bytes: int) -> Tile:
    """Returns the tile for a product with this number of rows and outputs."""
    if element_bytes > 2:
        return WIDE
    if num_rows <= FEW_ROWS.rows:
        return FEW_ROWS
    return next(
        (
            tile
            for tile in LARGER
            if ceil_div(num_rows, tile.rows) * ceil_div(num_outputs, tile.outputs) >= MANY_PROGRAMS
        ),
        FEW_ROWS,
    )


def stages_of(tile: Tile, shared_bytes: int) -> int:
    """Returns the number of prefetched steps that fit in a program's shared memory."""
    step = (tile.rows + tile.outputs) * INPUT_BYTES
    return max(1, min(tile.num_stages, shared_bytes // step))


@cache
def shared_bytes(device: torch.device) -> int:
    """Returns what a program may hold at most, as far as the device tells."""
    if device.type != "cuda":
        return LEAST_SHARED_BYTES
    found = torch.cuda.get_device_properties(device)
    names = ("shared_memory_per_block_optin", "shared_memory_per_block")
    return max([LEAST_SHARED_BYTES, *(getattr(found, name, 0) for name in names)])


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
