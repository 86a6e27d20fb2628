"""Attention through torch's SDPA, sequence by sequence: any device, no compiler. Promises no row
bits, knows no model.

Shapes are written with the letters of `paged_kv`; P is the number of a sequence's tokens up to its
last row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.stage.attention.paged_kv import (
    AttentionParams,
    DistanceBias,
    MicroBatch,
    PackedQkv,
    PagedKv,
    Span,
)
from shardline_scheduler.kv_blocks import BLOCK_TOKENS, blocks_for


class SdpaBackend:
    """Gathers each sequence's blocks into one tensor, then attends to it."""

    __slots__ = ("_block", "_kv", "_micro_batch", "_slot")

    def bind(self, kv: PagedKv) -> None:
        """Makes `kv` the storage that rows are written to and read from."""
        self._kv = kv

    def use(self, micro_batch: MicroBatch) -> None:
        """Sets the rows of the next forward. Raises ProtocolError for blocks outside the KV."""
        self._micro_batch = micro_batch
        micro_batch.check_blocks(self._kv.num_blocks)
        num_rows = sum(span.length for span in micro_batch.spans)
        sequence = micro_batch.sequence[:num_rows].long()
        position = micro_batch.position[:num_rows].long()
        self._block = micro_batch.table[sequence, position // BLOCK_TOKENS].long()
        self._slot = position % BLOCK_TOKENS

    def attend(self, layer: int, qkv: PackedQkv, params: AttentionParams) -> Tensor:
        """Writes one layer's new keys and values, then attends: returns [1, T, H, Dv] in the
        query's dtype."""
        keys, values = self._written(layer, qkv)
        query = qkv.query[0].to(self._kv.dtype)
        out = query.new_zeros(1, query.shape[1], query.shape[0], values.shape[-1])
        row = 0
        for blocks, span in zip(
            self._micro_batch.table.long(), self._micro_batch.spans, strict=True
        ):
            end = row + span.length
            past_keys = _gather(keys, blocks, span)
            past_values = _gather(values, blocks, span)
            out[0, row:end] = _attend_span(
                query[:, row:end], past_keys, past_values, span, params
            ).transpose(0, 1)
            row = end
        return out.to(qkv.query.dtype)

    def write(self, layer: int, qkv: PackedQkv, _params: AttentionParams) -> None:
        """Writes one layer's new keys and values only."""
        self._written(layer, qkv)

    def _written(self, layer: int, qkv: PackedQkv) -> tuple[Tensor, Tensor]:
        """Writes the new rows; returns all of the layer's keys [blocks, Hk, 64, D] and values
        [blocks, Hk, 64, Dv]."""
        key = qkv.key[0]
        value = qkv.value[0]
        keys = self._kv.keys[layer]
        values = self._kv.values[layer][..., : value.shape[-1]]
        num_rows = self._slot.shape[0]
        keys[self._block, :, self._slot] = key[:, :num_rows].transpose(0, 1).to(keys.dtype)
        values[self._block, :, self._slot] = value[:, :num_rows].transpose(0, 1).to(values.dtype)
        return keys, values


def _gather(store: Tensor, blocks: Tensor, span: Span) -> Tensor:
    """Returns a sequence's keys or values as one tensor [Hk, P, D] in the KV's dtype."""
    num_tokens = span.start + span.length
    return store[blocks[: blocks_for(num_tokens)]].transpose(0, 1).flatten(1, 2)[:, :num_tokens]


def _attend_span(
    query: Tensor, keys: Tensor, values: Tensor, span: Span, params: AttentionParams
) -> Tensor:
    """Query [H, rows, D] over keys [Hk, P, D] and values [Hk, P, Dv]: returns [H, rows, Dv]."""
    mask = _visible(keys.shape[1], span, params, query.device)
    if params.distance_bias is not None:
        bias = _bias(params.distance_bias, keys.shape[1], span).to(query.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
        return _attend_visible(query, keys, values, mask, params)
    if mask is None:
        return _attend_visible(query, keys, values, mask, params)
    # A masked score that is NaN stays NaN, and so is a weight of 0 times an infinite value
    (keys, odd_keys), (values, odd_values) = _finite(keys), _finite(values)
    sees_odd = (mask & (odd_keys | odd_values)).any(1)
    return _attend_visible(query, keys, values, mask, params).masked_fill(
        sees_odd[None, :, None], float("nan")
    )


def _finite(store: Tensor) -> tuple[Tensor, Tensor]:
    """Keys or values [Hk, P, D] with zeros for what is not finite, and the tokens that have some of
    it, bool [P]."""
    is_finite = store.isfinite()
    return store.where(is_finite, 0.0), ~is_finite.all(-1).all(0)


def _attend_visible(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, params: AttentionParams
) -> Tensor:
    """Query [H, rows, D] over keys and values that are finite where some are masked: returns [H,
    rows, Dv]."""
    if params.softcap is not None or params.sinks is not None:
        return _attend_in_float32(query, keys, values, mask, params)
    batched = (query[None], keys[None], values[None])
    is_grouped = query.shape[0] > keys.shape[0]
    return scaled_dot_product_attention(*batched, mask, scale=params.scale, enable_gqa=is_grouped)[
        0
    ]


def _visible(
    num_keys: int, span: Span, params: AttentionParams, device: torch.device
) -> Tensor | None:
    """Which keys each row sees, bool [rows, P]: none outside its window, and none after its own
    unless it sees both ways. None: it sees all."""
    sees_later = span.length == 1 or params.both_ways
    reach = params.window or params.chunk
    if sees_later and (reach is None or num_keys <= reach):
        return None
    row = torch.arange(span.start, span.start + span.length, device=device)[:, None]
    column = torch.arange(num_keys, device=device)[None]
    visible = column <= row
    if params.chunk is not None:
        return visible & (column >= row - row % params.chunk)
    if params.window is None:
        return visible
    if params.both_ways:
        return (column - row).abs() < params.window
    return visible & (column > row - params.window)


def _bias(bias: DistanceBias, num_keys: int, span: Span) -> Tensor:
    """What is added to the scores of a span's rows, float32 [H, rows, P]."""
    row = torch.arange(span.start, span.start + span.length, device=bias.table.device)[:, None]
    column = torch.arange(num_keys, device=bias.table.device)[None]
    return bias.table[:, bias.reach + column - row]


def _attend_in_float32(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, params: AttentionParams
) -> Tensor:
    """The same with softcap and sinks, which SDPA does not know."""
    num_heads, num_rows, head_dim = query.shape
    grouped = query.float().reshape(keys.shape[0], -1, head_dim)
    scores = (grouped @ keys.float().transpose(1, 2) * params.scale).view(num_heads, num_rows, -1)
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if params.sinks is not None:
        sinks = params.sinks.float().view(-1, 1, 1).expand(-1, num_rows, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    weighted = weights.reshape(keys.shape[0], -1, keys.shape[1]) @ values.float()
    return weighted.view(num_heads, num_rows, -1).to(query.dtype)
