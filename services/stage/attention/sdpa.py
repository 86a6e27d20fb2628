"""Attention through torch's SDPA, sequence by sequence: any device, no compiler. Promises no row bits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.stage.attention.paged_kv import AttentionParams, MicroBatch, PackedQkv, PagedKv, Span
from services.stage.scheduling.kv_blocks import BLOCK_TOKENS, blocks_for
from shardline.errors import ProtocolError


class SdpaBackend:
    """Gathers each sequence's blocks into one tensor, then attends to it."""

    __slots__ = ("_batch", "_block", "_kv", "_place")

    def bind(self, kv: PagedKv) -> None:
        """From now on rows are written to and read from `kv`."""
        self._kv = kv

    def use(self, batch: MicroBatch) -> None:
        """The next rows, checked here: an index outside the KV would wrap around, or kill the device."""
        self._batch = batch
        for span in batch.spans:
            if min(span.blocks) < 0 or max(span.blocks) >= self._kv.num_blocks:
                raise ProtocolError(f"a block table {tuple(span.blocks)} lies outside {self._kv.num_blocks} KV blocks")
        num_rows = sum(span.length for span in batch.spans)
        sequence, position = batch.sequence[:num_rows].long(), batch.position[:num_rows].long()
        self._block = batch.table[sequence, position // BLOCK_TOKENS].long()
        self._place = position % BLOCK_TOKENS

    def attend(self, layer: int, rows: PackedQkv, rule: AttentionParams) -> Tensor:
        """One layer."""
        keys, values = self._written(layer, rows)
        query = rows.query[0].to(self._kv.dtype)
        out = query.new_zeros(1, query.shape[1], query.shape[0], values.shape[-1])
        row = 0
        for blocks, span in zip(self._batch.table.long(), self._batch.spans, strict=True):
            end = row + span.length
            past_keys, past_values = _gather(keys, blocks, span), _gather(values, blocks, span)
            out[0, row:end] = _attend_span(query[:, row:end], past_keys, past_values, span, rule).transpose(0, 1)
            row = end
        return out.to(rows.query.dtype)

    def write(self, layer: int, rows: PackedQkv, _rule: AttentionParams) -> None:
        """Only the keys and values."""
        self._written(layer, rows)

    def _written(self, layer: int, rows: PackedQkv) -> tuple[Tensor, Tensor]:
        """The layer's keys and values, the new ones among them."""
        key, value = rows.key[0], rows.value[0]
        keys, values = self._kv.keys[layer], self._kv.values[layer][..., : value.shape[-1]]
        num_rows = self._place.shape[0]
        keys[self._block, :, self._place] = key[:, :num_rows].transpose(0, 1).to(keys.dtype)
        values[self._block, :, self._place] = value[:, :num_rows].transpose(0, 1).to(values.dtype)
        return keys, values


def _gather(store: Tensor, blocks: Tensor, span: Span) -> Tensor:
    """A sequence's keys or values as one tensor [Hk, tokens, D]."""
    num_tokens = span.start + span.length
    return store[blocks[: blocks_for(num_tokens)]].transpose(0, 1).flatten(1, 2)[:, :num_tokens]


def _attend_span(query: Tensor, keys: Tensor, values: Tensor, span: Span, rule: AttentionParams) -> Tensor:
    mask = _visible(keys.shape[1], span, rule, query.device)
    if rule.softcap is not None or rule.sinks is not None:
        return _attend_plainly(query, keys, values, mask, rule)
    batched = (query[None], keys[None], values[None])
    is_grouped = query.shape[0] > keys.shape[0]
    return scaled_dot_product_attention(*batched, mask, scale=rule.scale, enable_gqa=is_grouped)[0]


def _visible(num_keys: int, span: Span, rule: AttentionParams, device: torch.device) -> Tensor | None:
    """Which keys each row may see: none after itself, none before its window."""
    if span.length == 1 and (rule.window is None or num_keys <= rule.window):
        return None
    row = torch.arange(span.start, span.start + span.length, device=device)[:, None]
    column = torch.arange(num_keys, device=device)[None]
    visible = column <= row
    return visible if rule.window is None else visible & (column > row - rule.window)


def _attend_plainly(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, rule: AttentionParams) -> Tensor:
    """Softcap and sinks, which SDPA does not know, in fp32."""
    num_heads, num_rows, head_dim = query.shape
    grouped = query.float().reshape(keys.shape[0], -1, head_dim)
    scores = (grouped @ keys.float().transpose(1, 2) * rule.scale).view(num_heads, num_rows, -1)
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if rule.sinks is not None:
        sinks = rule.sinks.float().view(-1, 1, 1).expand(-1, num_rows, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    weighted = weights.reshape(keys.shape[0], -1, keys.shape[1]) @ values.float()
    return weighted.view(num_heads, num_rows, -1).to(query.dtype)
