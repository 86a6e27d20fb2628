"""Products and RMSNorm for GPUs in Triton. Imported only where they run: importing this module
imports triton.

The promise: a row's bits depend on that row and the weights. Nothing else: not the number of rows,
nor the place of the row among them. It rests on these rules:

- **One shape.** A tile is ROWS rows, constants of the layer's dtype, whether one row fills it or
  many do: the same matrix instructions for one decode row as for a prefill. A row's sums take
  nothing from another row of the tile.
- **One order.** A sum runs over the inputs in whole blocks of INPUTS, ascending, in float32. No sum
  is split over programs. A norm is one program for each row.
- **One precision.** float32 inputs are multiplied as float32 (`ieee`), never as TF32; results are
  rounded once.
- **One binary per layer shape.** Triton would compile other code for arguments that equal 1 or
  divide by 16, so the number of rows is not specialized on, and all tensors are dense and aligned:
  what else changes is a constant.

Letters of shapes: T rows, K inputs and N outputs of a product, D the width of a normalized row.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def multiply(
    x,
    weight,
    bias,
    out,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Program (row tile, output tile) computes x [T, K] @ weight [N, K].T + bias [N] for its part
    of out [T, N].

    Row tiles of the same outputs are neighbors in launch order: the first fetches weights into the
    cache for all.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    place = tl.arange(0, INPUTS)
    is_row = row < num_rows
    is_output = output < N
    wide_row = row.to(tl.int64)
    wide_output = output.to(tl.int64)
    x_at = x + wide_row[:, None] * K + place[None, :]
    weight_at = weight + wide_output[None, :] * K + place[:, None]
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for first in range(0, K, INPUTS):
        is_input = first + place < K
        rows = tl.load(x_at + first, mask=is_row[:, None] & is_input[None, :], other=0.0)
        columns = tl.load(weight_at + first, mask=is_input[:, None] & is_output[None, :], other=0.0)
        if IS_INTERPRETED:  # its products take bfloat16 for integers
            rows = rows.to(tl.float32)
            columns = columns.to(tl.float32)
        sums = tl.dot(rows, columns, sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    out_at = out + wide_row[:, None] * N + output[None, :]
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def rms_norm(
    x,
    scale,
    out,
    eps,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
):
    """Program (row) computes x / rms(x) * scale for one row of x [T, D]; `scale` is float32 [D]."""
    dim = tl.arange(0, PADDED_WIDTH)
    is_here = dim < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + dim
    values = tl.load(x + at, mask=is_here, other=0.0).to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    if ROUNDS_FIRST:
        normed = normed.to(x.dtype.element_ty).to(tl.float32)
    weighted = normed * tl.load(scale + dim, mask=is_here, other=0.0)
    tl.store(out + at, weighted.to(out.dtype.element_ty), mask=is_here)
