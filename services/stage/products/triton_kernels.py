"""Products, RMSNorm and elementwise parts for GPUs in Triton. Imported only where they run:
importing this module imports triton.

The promise: a row's bits depend on that row and the weights. Nothing else: not the number of rows,
nor the place of the row among them. It rests on these rules:

- **Whole tiles.** A tile is ROWS rows, whether one row fills it or many do. A row's sums take
  nothing from another row of the tile. Few rows and many have tiles of other sizes, which take the
  same matrix instructions along a sum; the tests compare their bits on every device they run on.
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


@triton.jit
def silu_mul(
    gate,
    up,
    out,
    WIDTH: tl.constexpr,
    GATE_ROW: tl.constexpr,
    UP_ROW: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (row, block of columns) computes silu(gate) * up for its part of out [T, WIDTH]; rows
    of `gate` and `up` are GATE_ROW and UP_ROW elements apart."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_here = column < WIDTH
    gates = tl.load(gate + row * GATE_ROW + column, mask=is_here, other=0.0).to(tl.float32)
    ups = tl.load(up + row * UP_ROW + column, mask=is_here, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    # Rounded where the model rounds
    activated = (gates / (1.0 + tl.exp(-gates))).to(kind).to(tl.float32)
    tl.store(out + row * WIDTH + column, (activated * ups).to(kind), mask=is_here)


@triton.jit
def rotate(
    x,
    cos,
    sin,
    out,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    X_ROW: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Program (row, HEADS heads) rotates the halves of each head of one row by cos and sin
    [T, 2 HALF] into out [T, NUM_HEADS, 2 HALF]; rows of `x` are X_ROW elements apart."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, PADDED_HALF)
    is_dim = dim < HALF
    is_here = (head < NUM_HEADS)[:, None] & is_dim[None, :]
    table = row * 2 * HALF + dim
    first_cos = tl.load(cos + table, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    second_cos = tl.load(cos + table + HALF, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    first_sin = tl.load(sin + table, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    second_sin = tl.load(sin + table + HALF, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    place = head[:, None] * (2 * HALF) + dim[None, :]
    first = tl.load(x + row * X_ROW + place, mask=is_here, other=0.0).to(tl.float32)
    second = tl.load(x + row * X_ROW + place + HALF, mask=is_here, other=0.0).to(tl.float32)
    to = out + row * NUM_HEADS * (2 * HALF) + place
    kind = out.dtype.element_ty
    # Rounded where the model rounds
    near = (first * first_cos).to(kind).to(tl.float32)
    far = (second * first_sin).to(kind).to(tl.float32)
    tl.store(to, (near - far).to(kind), mask=is_here)
    near = (second * second_cos).to(kind).to(tl.float32)
    far = (first * second_sin).to(kind).to(tl.float32)
    tl.store(to + HALF, (near + far).to(kind), mask=is_here)
