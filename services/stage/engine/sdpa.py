"""Attention through torch's SDPA, sequence by sequence: any device, any dtype, no compiler. Row bits are not promised."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from services.stage.engine.kv_cache import BLOCK_TOKENS
from services.stage.engine.paged import Batch, PagedKv, Rule, Span


def attend(kv: PagedKv, layer: int, batch: Batch, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
    """Writes this step's keys and values, then attends. query [H, T, D], key and value [Hk, T, D] -> [T, H, D]."""
    num_rows = sum(span.length for span in batch.spans)
    keys, values = kv.keys[layer], kv.values[layer][..., : value.shape[-1]]
    sequence, position = batch.sequence[:num_rows].long(), batch.position[:num_rows].long()
    block, place = batch.table[sequence, position // BLOCK_TOKENS].long(), position % BLOCK_TOKENS
    keys[block, :, place] = key[:, :num_rows].transpose(0, 1)
    values[block, :, place] = value[:, :num_rows].transpose(0, 1)
    out = query.new_zeros(query.shape[1], query.shape[0], value.shape[-1])
    row = 0
    for index, span in enumerate(batch.spans):
        blocks = batch.table[index].long()
        one = query[:, row : row + span.length]
        attended = _attend_span(one, _gather(keys, blocks, span), _gather(values, blocks, span), span, rule)
        out[row : row + span.length] = attended.transpose(0, 1)
        row += span.length
    return out


def _gather(store: Tensor, blocks: Tensor, span: Span) -> Tensor:
    """A sequence's keys or values as one tensor [Hk, tokens, D]."""
    end = span.start + span.length
    used = blocks[: -(-end // BLOCK_TOKENS)]
    return store[used].transpose(0, 1).flatten(1, 2)[:, :end]


def _attend_span(query: Tensor, keys: Tensor, values: Tensor, span: Span, rule: Rule) -> Tensor:
    mask = _visible(keys.shape[1], span, rule, query.device)
    if rule.softcap is None and rule.sinks is None:
        batched = (query[None], keys[None], values[None])
        is_grouped = query.shape[0] > keys.shape[0]
        return F.scaled_dot_product_attention(*batched, mask, scale=rule.scale, enable_gqa=is_grouped)[0]
    return _attend_plainly(query, keys, values, mask, rule)


def _visible(num_keys: int, span: Span, rule: Rule, device: torch.device) -> Tensor | None:
    """Which keys each row may see: none after itself, none before its window."""
    if span.length == 1 and (rule.window is None or num_keys <= rule.window):
        return None
    row = torch.arange(span.start, span.start + span.length, device=device)[:, None]
    column = torch.arange(num_keys, device=device)[None]
    visible = column <= row
    return visible if rule.window is None else visible & (column > row - rule.window)


def _attend_plainly(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, rule: Rule) -> Tensor:
    """Softcap and sinks, which SDPA does not know, in fp32."""
    num_heads, num_rows, head_dim = query.shape
    grouped = query.float().view(keys.shape[0], -1, head_dim)
    scores = (grouped @ keys.float().transpose(1, 2) * rule.scale).view(num_heads, num_rows, -1)
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if rule.sinks is not None:
        sinks = rule.sinks.float().view(-1, 1, 1).expand(-1, num_rows, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    weighted = weights.view(keys.shape[0], -1, keys.shape[1]) @ values.float()
    return weighted.view(num_heads, num_rows, -1).to(query.dtype)
