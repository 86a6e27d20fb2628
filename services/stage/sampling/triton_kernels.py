"""Draws tokens on GPUs in Triton: one program for each row of logits. Imported only where it runs:
importing this module imports triton.

The promise: a row's token depends on that row, its parameters and its random numbers alone. One
program goes over a row in blocks of ascending tokens; sums of a block run over a constant shape,
and those of blocks one by one in float64.

Letters of shapes: R rows, V the vocabulary, U random numbers of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["logits"])
def draw(
    logits,
    scales,
    least_logits,
    least_weights,
    top_p,
    uniforms,
    tokens,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_UNIFORMS: tl.constexpr,
    NOT_FINITE: tl.constexpr,
    NONE_LEFT: tl.constexpr,
    NONE_DRAWN: tl.constexpr,
):
    """Program (row) draws a token of logits float32 [R, V] into `tokens`, int32 [R], by rejection,
    as `Sampler._draw` tells.

    `scales`, `least_logits` and `least_weights` are float32 [R], `top_p` float64 [R]: what turns
    logits into powers of two, the bounds of top_k and min_p, and the mass of the nucleus;
    `uniforms` is float64 [R, U]. A row that is no distribution gives NOT_FINITE or NONE_LEFT, one
    that needs more random numbers NONE_DRAWN.
    """
    row = tl.program_id(0)
    at = logits + row.to(tl.int64) * VOCABULARY
    place = tl.arange(0, BLOCK)
    scale = tl.load(scales + row)
    least_logit = tl.load(least_logits + row)
    least_weight = tl.load(least_weights + row)

    # tl.max may pass over a NaN, which is not equal to itself
    peak = float("-inf")
    num_odd = 0
    for first in range(0, VOCABULARY, BLOCK):
        values = tl.load(at + first + place, mask=first + place < VOCABULARY, other=float("-inf"))
        is_number = (values >= 0.0) | (values < 0.0)
        num_odd += tl.sum(1 - is_number.to(tl.int32), 0)
        peak = tl.maximum(peak, tl.max(values, 0))
    is_finite = (num_odd == 0) & (peak < float("inf"))
    token = tl.where(is_finite & (peak > float("-inf")), NONE_DRAWN, NOT_FINITE)
    token = tl.where(is_finite & (peak == float("-inf")), NONE_LEFT, token)

    # What holds `top_p` of the mass that top_k leaves; min_p bounds the rest
    bound = 0.0
    total = tl.zeros([], tl.float64)
    nucleus = tl.zeros([], tl.float64)
    if token == NONE_DRAWN:
        mass = tl.zeros([], tl.float64)
        for first in range(0, VOCABULARY, BLOCK):
            values = tl.load(
                at + first + place, mask=first + place < VOCABULARY, other=float("-inf")
            )
            weights = tl.where(values >= least_logit, tl.exp2((values - peak) * scale), 0.0)
            mass += tl.sum(weights.to(tl.float64), 0)
            total += tl.sum(tl.where(weights >= least_weight, weights, 0.0).to(tl.float64), 0)
        nucleus = mass * tl.load(top_p + row)
    for proposal in range(NUM_UNIFORMS):
        if token == NONE_DRAWN:
            wanted = tl.load(uniforms + row * NUM_UNIFORMS + proposal) * total
            # The first token with a running sum above `wanted`; else the last one with a weight
            before = tl.zeros([], tl.float64)
            found = -1
            last = -1
            for first in range(0, VOCABULARY, BLOCK):
                if found < 0:
                    values = tl.load(
                        at + first + place, mask=first + place < VOCABULARY, other=float("-inf")
                    )
                    weights = tl.where(values >= least_logit, tl.exp2((values - peak) * scale), 0.0)
                    is_kept = (weights >= least_weight) & (weights > bound)
                    kept = tl.where(is_kept, weights, 0.0).to(tl.float64)
                    sums = before + tl.cumsum(kept, 0)
                    is_above = is_kept & (sums > wanted)
                    inside = tl.min(tl.where(is_above, first + place, VOCABULARY), 0)
                    found = tl.where(inside < VOCABULARY, inside, -1)
                    last = tl.maximum(last, tl.max(tl.where(is_kept, first + place, -1), 0))
                    before += tl.sum(kept, 0)
            found = tl.where(found < 0, last, found)
            weight = tl.exp2((tl.load(at + found) - peak) * scale)
            heavier = tl.zeros([], tl.float64)
            for first in range(0, VOCABULARY, BLOCK):
                values = tl.load(
                    at + first + place, mask=first + place < VOCABULARY, other=float("-inf")
                )
                weights = tl.where(values >= least_logit, tl.exp2((values - peak) * scale), 0.0)
                is_heavier = (weights >= least_weight) & (weights > weight)
                heavier += tl.sum(tl.where(is_heavier, weights, 0.0).to(tl.float64), 0)
            if (heavier < nucleus) | (tl.load(top_p + row) >= 1.0):
                token = found
            bound = weight
            total = heavier
    tl.store(tokens + row, token)
