"""Paged attention for GPUs in Triton: two kernels, one that writes new keys and values, one that
attends.

Imported only where it runs (`triton_backend.load`): importing it imports triton. Decode rows and
chunks of prefill take the same instructions of the same binary.

The promise: a row's bits depend on its query, its position and its own sequence's keys and values.
Nothing else: not the batch, the chunk, the rows of its tile, or where blocks lie in the pool. It
rests on these rules:

- **One shape.** A tile is TILE lanes, a constant of the layer, whether one row fills it or many do:
  the same matrix instructions for one decode row as for a chunk. A lane is one query head of one
  row, and its results take nothing from another lane: matrix products and reductions along a lane's
  keys treat all lanes alike.
- **One order.** A lane's loop goes over whole KV blocks in ascending absolute position. One block
  is one step: 64 scores, their maximum and sum, 64 weighted values. No sequence is split over
  programs.
- **Steps that a lane does not need change no bit.** A tile begins at the first block that any of
  its lanes sees. For a lane that sees nothing of a block, the maximum stays, the rescaling is
  exactly 1 (or, before its first key, scales zeros), and zeros are added.
- **Masked values are zeros.** Values past the tile's last row are never loaded: a weight of 0 times
  what lies there (another sequence's infinity) could be NaN. In blocks of which a lane may not see
  all, values of the tile's own sequence that are not finite count as zeros, and the lanes that do
  see one get NaN.
- **One precision.** Scores, softmax and sums are float32; float32 inputs are multiplied as float32
  (`ieee`), never as TF32. Weights are rounded to the KV's dtype for the second product, as the
  values are.
- **One binary per layer shape.** Triton would compile other code for arguments that equal 1 or
  divide by 16, so no argument that changes from call to call is specialized on.

Letters of shapes are those of `paged_kv`; G query heads share a KV head.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["key_head", "key_row", "value_head", "value_row", "table_width"],
    do_not_specialize_on_alignment=["key", "value", "sequence", "position", "table"],
)
def write(
    key,
    value,
    keys,
    values,
    sequence,
    position,
    table,
    key_head,
    key_row,
    value_head,
    value_row,
    table_width,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    STORED_VALUE_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
):
    """Program (row, KV head) writes one key and one value to their slot. Padding rows write
    nothing."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    number = tl.load(sequence + row)
    if number >= 0:
        place = tl.load(position + row)
        block = tl.load(table + number.to(tl.int64) * table_width + place // BLOCK).to(tl.int64)
        slot = (block * KV_HEADS + kv_head) * BLOCK + place % BLOCK
        dim = tl.arange(0, PADDED_DIM)
        new_key = tl.load(key + kv_head * key_head + row * key_row + dim, mask=dim < DIM)
        tl.store(keys + slot * DIM + dim, new_key.to(keys.dtype.element_ty), mask=dim < DIM)
        dim = tl.arange(0, PADDED_VALUE_DIM)
        new_value = tl.load(
            value + kv_head * value_head + row * value_row + dim, mask=dim < VALUE_DIM
        )
        tl.store(
            values + slot * STORED_VALUE_DIM + dim,
            new_value.to(values.dtype.element_ty),
            mask=dim < VALUE_DIM,
        )


@triton.jit(
    do_not_specialize=["query_head", "query_row", "num_rows", "table_width", "window", "chunk"],
    do_not_specialize_on_alignment=["query", "out", "sequence", "position", "table", "sinks"],
)
def attend(
    query,
    keys,
    values,
    out,
    sinks,
    sequence,
    position,
    table,
    query_head,
    query_row,
    num_rows,
    table_width,
    scale,
    softcap,
    window,
    chunk,
    HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    STORED_VALUE_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Program (row, KV head) attends for the tile that begins at the row, and ends at once where
    none does.

    A tile is cut at positions that divide by TILE // GROUP. Padding rows are separate tiles that
    see no key: zeros.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    TILE_ROWS: tl.constexpr = TILE // GROUP
    first = tl.program_id(0)
    kv_head = tl.program_id(1)
    number = tl.load(sequence + first)
    start = tl.load(position + first)
    before = tl.maximum(first - 1, 0)
    follows = (
        (first > 0)
        & (tl.load(sequence + before) == number)
        & (tl.load(position + before) + 1 == start)
    )
    if follows & (start % TILE_ROWS != 0):
        return

    # Lanes: row by row, in each row head by head; the last TILE % GROUP are idle
    lane = tl.arange(0, TILE)
    offset = lane // GROUP
    row = first + offset
    is_here = (offset < TILE_ROWS - start % TILE_ROWS) & (row < num_rows)
    is_here &= tl.load(sequence + row, mask=is_here, other=-1) == number
    is_here &= tl.load(position + row, mask=is_here, other=-1) == start + offset
    place = start + offset
    head = kv_head * GROUP + lane % GROUP
    dim = tl.arange(0, PADDED_DIM)
    value_dim = tl.arange(0, PADDED_VALUE_DIM)
    slot = tl.arange(0, BLOCK)
    wide_row = row.to(tl.int64)
    at = head.to(tl.int64) * query_head + wide_row * query_row
    rows = tl.load(
        query + at[:, None] + dim[None, :], mask=is_here[:, None] & (dim < DIM)[None, :], other=0.0
    )
    rows = rows.to(keys.dtype.element_ty)
    if IS_INTERPRETED:  # its products take bfloat16 for integers
        rows = rows.to(tl.float32)

    # The blocks that any row of the tile sees. Rows are consecutive, so the first one sees the
    # earliest key
    num_keys = tl.where(number < 0, 0, start + tl.sum(is_here.to(tl.int32)) // GROUP)
    first_block = 0
    first_of_last = 0
    if IS_BOUNDED:
        first_block = tl.maximum(start - start % chunk, start - window + 1) // BLOCK
        first_token = tl.maximum(place - place % chunk, place - window + 1)
        last = num_keys - 1
        first_of_last = tl.maximum(last - last % chunk, last - window + 1)
    if HAS_SINKS:
        most = tl.load(sinks + head, mask=is_here, other=0.0).to(tl.float32) * LOG2E
        total = tl.full([TILE], 1.0, tl.float32)
    else:
        most = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
    sums = tl.zeros([TILE, PADDED_VALUE_DIM], tl.float32)
    spoiled = tl.zeros([TILE], tl.int32)
    blocks = table + tl.maximum(number, 0).to(tl.int64) * table_width
    for index in range(first_block, tl.cdiv(num_keys, BLOCK)):
        store = (tl.load(blocks + index).to(tl.int64) * KV_HEADS + kv_head) * BLOCK
        token = index * BLOCK + slot
        is_written = token < num_keys
        block_keys = tl.load(
            keys + (store + slot)[None, :] * DIM + dim[:, None],
            mask=is_written[None, :] & (dim < DIM)[:, None],
            other=0.0,
        )
        if IS_INTERPRETED:
            block_keys = block_keys.to(tl.float32)
        scores = tl.dot(rows, block_keys, input_precision="ieee") * scale
        # tanh(x) = 1 - 2 / (exp(2x) + 1): right at both ends, where exp overflows or vanishes
        if HAS_SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2E / softcap)) + 1.0))
        is_seen = (token[None, :] <= place[:, None]) & is_here[:, None]
        if IS_BOUNDED:
            is_seen &= token[None, :] >= first_token[:, None]
        scores = tl.where(is_seen, scores * LOG2E, float("-inf"))
        new_most = tl.maximum(most, tl.max(scores, 1))
        # Until a lane has seen a key both are -inf: their difference would be NaN
        base = tl.where(new_most == float("-inf"), 0.0, new_most)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.sum(weights, 1)
        block_values = tl.load(
            values + (store + slot)[:, None] * STORED_VALUE_DIM + value_dim[None, :],
            mask=is_written[:, None] & (value_dim < VALUE_DIM)[None, :],
            other=0.0,
        )
        if IS_INTERPRETED:
            block_values = block_values.to(tl.float32)
        is_behind = index * BLOCK < first_of_last
        if is_behind | ((index + 1) * BLOCK > start + 1):
            wide_values = block_values.to(tl.float32)
            is_odd = (wide_values - wide_values) != 0.0
            block_values = tl.where(is_odd, tl.zeros_like(block_values), block_values)
            odd_token = tl.max(is_odd.to(tl.int32), 1)
            spoiled = tl.maximum(spoiled, tl.max(tl.where(is_seen, odd_token[None, :], 0), 1))
        rounded = weights.to(values.dtype.element_ty)
        if IS_INTERPRETED:
            rounded = rounded.to(tl.float32)
        sums = tl.dot(rounded, block_values, sums * shrink[:, None], input_precision="ieee")
        most = new_most
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    sums = tl.where((spoiled != 0)[:, None], float("nan"), sums)

    to = (wide_row * (KV_HEADS * GROUP) + head) * VALUE_DIM
    is_stored = is_here[:, None] & (value_dim < VALUE_DIM)[None, :]
    tl.store(out + to[:, None] + value_dim[None, :], sums.to(out.dtype.element_ty), mask=is_stored)
