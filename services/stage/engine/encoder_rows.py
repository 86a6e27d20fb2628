"""Checks on the loaded shard of an encoder whether a text's rows get the same bits whatever texts
are packed next to them. Knows no scheduler and no job."""

from __future__ import annotations

import torch
from torch import Tensor

from services.stage.attention.paged_kv import Span
from services.stage.engine.forward import Forward
from shardline_scheduler.kv_blocks import BLOCK_TOKENS

SEED = 5
LENGTHS = (BLOCK_TOKENS + 9, 1, 37, 16, BLOCK_TOKENS)
"""Of the tested text, which crosses the edge of a KV block, and of its neighbors."""


@torch.inference_mode()
def encoder_is_exact(forward: Forward) -> bool:
    """Runs one text alone, before others and behind them, and compares every bit. Uses the first KV
    blocks: no sequence may be open."""
    longest = min(forward.shard.info.context_length, forward.kv.num_blocks // 2 * BLOCK_TOKENS)
    lengths = [min(length, longest) for length in LENGTHS]
    generator = torch.Generator().manual_seed(SEED)
    texts = [forward.random_inputs(length, generator) for length in lengths if length]
    if not texts:
        return False
    alone = _run(forward, texts[:1])[: lengths[0]]
    before = _run(forward, texts)[: lengths[0]]
    behind = _run(forward, texts[::-1])[-lengths[0] :]
    return torch.equal(alone, before) and torch.equal(alone, behind)


def _run(forward: Forward, texts: list[Tensor]) -> Tensor:
    """Returns the hidden states [T, H] of as many of the texts as the KV holds, the first and the
    last one among them."""
    spans: list[Span] = []
    left = list(range(forward.kv.num_blocks))
    kept: list[Tensor] = []
    needed = [-(-len(text) // BLOCK_TOKENS) for text in texts]
    for place, text in enumerate(texts):
        is_tested = needed[place] == max(needed)
        if not is_tested and len(left) - needed[place] < max(needed):
            continue
        blocks = [left.pop() for _ in range(needed[place])]
        spans.append(Span(start=0, length=len(text), blocks=blocks))
        kept.append(text)
    return forward.hidden(spans, torch.cat(kept))
