"""Tries on a model's miniature whether stages compute what the whole model does: packed rows, chunks, our attention.

The whole miniature runs as transformers wrote it, each sequence alone, with its own masks, positions and attention. So
whatever a model does that a split or a packed batch would leave out is seen, in every model, without a list of names:
state that goes from token to token, masks of its own, positions that it counts itself, keys shared across layers.

Letters of shapes: T packed rows, V the vocabulary.
"""

from __future__ import annotations

import copy
import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import structlog
import torch
import transformers
from torch import Tensor

from services.stage.attention.attention import Attention
from services.stage.attention.paged_kv import KvShape, PagedKv, Span
from services.stage.engine.forward import Forward
from services.stage.model import cache
from services.stage.model.experts import EXPERTS
from services.stage.model.kv_shapes import probe_kv_shapes
from services.stage.model.miniature import FAILURES, VOCAB, build_miniature, first_line, miniature_config
from services.stage.model.model_info import ModelInfo
from services.stage.model.refusal import refuse
from services.stage.model.row_buckets import RowPadding
from services.stage.model.shard import Shard, quiet_transformers, shard_class
from shardline.clock import monotonic_s

log = structlog.get_logger(__name__)

VERSION = 1
LENGTHS = (30, 9)
"""Of two sequences: longer than a sliding window, shorter than a KV block."""
CUTS = ((0, 17, 29, 30), (0, 4, 8, 9))
"""Where each is cut into the chunks that run in one step; the last is a decode."""
TOLERANCE = 1e-3
"""The largest difference accepted, in shares of the largest logit. Float32 in another order gives some 1e-6, a part
that is left out more than 1e-1."""
TRIES = 3
"""Of other tokens: in a mixture two experts may be so near to each other that a rounding decides which is chosen."""
CPU = torch.device("cpu")


def check_split(config: Any, cache_folder: Path) -> None:
    """Raises Invalid, with the reason, if stages of a model of this config would compute something else than the whole
    model.

    A model that passed is not tried again while its code, its structure and the libraries stay the same.
    """
    config = miniature_config(config)
    facts = [VERSION, transformers.__version__, torch.__version__, config.to_json_string(use_diff=False)]
    name = f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()}.split"
    if cache.recall(cache_folder, name) is not None:
        return
    began_s = monotonic_s()
    kind = config.model_type
    try:
        with quiet_transformers():
            agrees = any(_difference(config, seed) <= TOLERANCE for seed in range(TRIES))
    except FAILURES as error:
        refuse(f"{kind!r} does not run in stages: {type(error).__name__}: {first_line(error)}", cause=error)
    if not agrees:
        refuse(f"{kind!r} computes something else in stages than whole")
    cache.store(cache_folder, name, "")
    tried_s = round(monotonic_s() - began_s, 2)
    log.info("stages compute what the whole model computes", model_type=kind, tried_s=tried_s)


@torch.inference_mode()
def _difference(config: Any, seed: int) -> float:
    """The largest difference between logits of whole and stages, as a share of the largest logit; NaN if one is."""
    whole = build_miniature(config)
    if any(getattr(module, "is_causal", True) is False for module in whole.modules()):
        refuse(f"{config.model_type!r} attends to later tokens, or to another model's")
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(VOCAB, (length,), generator=generator) for length in LENGTHS]
    expected = torch.cat([whole(input_ids=ids[None], use_cache=False).logits[0] for ids in sequences])
    found = _in_stages(_stages(whole), sequences)
    return float((found - expected).abs().max() / expected.abs().max())


def _stages(whole: Any) -> list[Forward]:
    """First layer, middle layers and last layer of the miniature, with KV of their own."""
    config = whole.config
    num_layers = config.num_hidden_layers
    info = ModelInfo(
        path=Path(),
        revision=None,
        config=config,
        num_layers=num_layers,
        context_length=max(LENGTHS),
        vocab_size=VOCAB,
        hidden_size=config.hidden_size,
        eos_ids=(),
    )
    cuts = sorted({0, 1, num_layers - 1, num_layers})
    attention, shapes = Attention(None), dict[int, KvShape]()
    shards = [_shard(whole, info, range(start, stop), attention) for start, stop in pairwise(cuts)]
    for shard in shards:
        shapes |= probe_kv_shapes(shard)
    kv = PagedKv(layers=shapes, num_blocks=len(LENGTHS), dtype=torch.float32)
    return [Forward(shard, attention, kv, RowPadding(buckets=frozenset())) for shard in shards]


def _shard(whole: Any, info: ModelInfo, layers: range, attention: Attention) -> Shard:
    model = shard_class(info, layers, lambda _: None)(copy.deepcopy(whole.config)).eval()
    missing = model.load_state_dict(whole.state_dict(), strict=False, assign=True).missing_keys
    assert not missing, f"stages have weights of their own: {missing}"
    model.set_attn_implementation(attention.name)
    model.set_experts_implementation(EXPERTS)
    return Shard(model, info, layers, CPU)


def _in_stages(stages: list[Forward], sequences: list[Tensor]) -> Tensor:
    """The logits [T, V] of all rows, sequence by sequence, computed packed, chunk by chunk."""
    rows: list[list[Tensor]] = [[] for _ in sequences]
    for chunks in zip(*(pairwise(cuts) for cuts in CUTS), strict=True):
        spans = [Span(start=start, length=stop - start, blocks=[place]) for place, (start, stop) in enumerate(chunks)]
        x = torch.cat([ids[start:stop] for ids, (start, stop) in zip(sequences, chunks, strict=True)])
        for stage in stages:
            x = stage.sampled_outputs(spans, x, list(range(len(x))))
        for place, part in enumerate(x.split([span.length for span in spans])):
            rows[place].append(part)
    return torch.cat([part for parts in rows for part in parts])
