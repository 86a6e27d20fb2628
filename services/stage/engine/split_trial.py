"""Tries on a model's miniature whether stages compute what the whole model does: packed rows,
chunks, our attention.

The whole miniature runs as transformers wrote it, each sequence alone, with its own masks,
positions and attention. So whatever a model does that a split or a packed batch would leave out is
seen, in every model, without a list of names: state that goes from token to token, its own masks,
positions that it counts itself, keys shared across layers.

Letters of shapes: T packed rows, V the vocabulary.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
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
from services.stage.model.encoders.encoder_class import is_encoder, sees_both_ways
from services.stage.model.kv_shapes import probe_kv_shapes
from services.stage.model.miniature import build_miniature, miniature_config
from services.stage.model.model_info import ModelInfo
from services.stage.model.refusal import refuse
from services.stage.model.shard import Shard, quiet_transformers, shard_class
from services.stage.model.text_part import language_model, model_class, text_config
from services.stage.products import cache
from services.stage.products.experts import EXPERTS
from services.stage.products.module_failures import FAILURES, first_line
from services.stage.products.row_buckets import RowPadding
from services.stage.recurrent.states import RecurrentStates
from shardline.base.clock import monotonic_s
from shardline.contract.fleet.joined_layers import joined_layers

log = structlog.get_logger(__name__)

VERSION = 4
LENGTHS = (30, 9)
"""Of two sequences: longer than a sliding window, shorter than a KV block."""
CUTS = ((0, 17, 29, 30), (0, 4, 8, 9))
"""Where each is cut into the chunks that run in one step; the last is a decode."""
TOLERANCE = 1e-3
"""The largest difference accepted, in shares of the largest logit. Float32 in another order gives
some 1e-6, a part that is left out more than 1e-1."""
TRIES = 3
"""Of other tokens: in a mixture two experts may be so near to each other that a rounding decides
which is chosen."""
NO_STRUCTURE = ("_name_or_path", "architectures")
"""Fields of a config that name a model's folder and possible classes, not the code that runs."""
CPU = torch.device("cpu")


Compute = Callable[[Any, list[Tensor]], Tensor]
"""Takes the whole miniature and sequences of ids, int64 [length]; returns the logits [T, V], of an
encoder the hidden states, of all, one behind the other."""


def check_split(config: Any, cache_folder: Path) -> None:
    """Raises Invalid, with the reason, if stages of a model of this config would compute something
    else than the whole model.

    A model that passed is not tried again while its code, its structure and the libraries stay the
    same.
    """
    run = in_one_step if is_encoder(config) else in_steps
    try_miniature(
        config, cache_folder, "stages", lambda whole, sequences: run(_stages(whole), sequences)
    )


def try_miniature(config: Any, cache_folder: Path, parts: str, compute: Compute) -> None:
    """Checks as `check_split` does, for any part of a model; `parts` is its name in words."""
    config = miniature_config(config)
    structure = json.loads(config.to_json_string(use_diff=False))
    for name in NO_STRUCTURE:
        structure.pop(name, None)
    facts = [
        VERSION,
        parts,
        transformers.__version__,
        torch.__version__,
        getattr(model_class(config), "__name__", None),
        structure,
    ]
    name = f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()}.split"
    if cache.recall(cache_folder, name) is not None:
        return
    began_s = monotonic_s()
    kind = config.model_type
    try:
        with quiet_transformers():
            agrees = any(_difference(config, seed, compute) <= TOLERANCE for seed in range(TRIES))
    except FAILURES as error:
        refuse(
            f"{kind!r} does not run in {parts}: {type(error).__name__}: {first_line(error)}",
            cause=error,
        )
    if not agrees:
        refuse(f"{kind!r} computes something else in {parts} than whole")
    cache.store(cache_folder, name, "")
    tried_s = round(monotonic_s() - began_s, 2)
    log.info(
        "parts compute what the whole model computes", parts=parts, model_type=kind, tried_s=tried_s
    )


@torch.inference_mode()
def _difference(config: Any, seed: int, compute: Compute) -> float:
    """The largest difference between logits of whole and parts, as a share of the largest logit;
    NaN if one is."""
    whole = build_miniature(config)
    looks_back = not sees_both_ways(config)
    if looks_back and any(getattr(each, "is_causal", True) is False for each in whole.modules()):
        refuse(f"{config.model_type!r} attends to later tokens, or to another model's")
    generator = torch.Generator().manual_seed(seed)
    sequences = [
        # Encoders may leave out padding, token 0 or 1, where they count positions.
        torch.randint(2, text_config(whole.config).vocab_size, (length,), generator=generator)
        for length in LENGTHS
    ]
    expected = torch.cat([_outputs(whole, ids) for ids in sequences])
    found = compute(whole, sequences)
    return float((found - expected).abs().max() / expected.abs().max())


def _outputs(whole: Any, ids: Tensor) -> Tensor:
    """Those of a sequence alone, as transformers computes them: [T, V], of an encoder [T, H]."""
    if is_encoder(whole.config):
        states: Tensor = language_model(whole)(input_ids=ids[None]).last_hidden_state
        return states[0]
    logits: Tensor = whole(input_ids=ids[None], use_cache=False).logits
    return logits[0]


def _stages(whole: Any) -> list[Forward]:
    """First layer, middle layers and last layer of the miniature, with separate KV."""
    num_layers = text_config(whole.config).num_hidden_layers
    joined = joined_layers(text_config(whole.config).to_dict())
    last_cut = num_layers - 1 if joined is None else min(num_layers - 1, joined.layers.start)
    cuts = sorted({0, min(1, last_cut), last_cut, num_layers})
    attention = Attention(None, both_ways=sees_both_ways(whole.config))
    shapes = dict[int, KvShape]()
    shards = [shard_of(whole, range(start, stop), attention) for start, stop in pairwise(cuts)]
    for shard in shards:
        shapes |= probe_kv_shapes(shard)
    return [forward_of(shard, attention, shapes) for shard in shards]


def shard_of(whole: Any, layers: range, attention: Attention) -> Shard:
    """Some layers of the miniature, with its weights."""
    sizes = text_config(whole.config)
    info = ModelInfo(
        path=Path(),
        revision=None,
        config=whole.config,
        num_layers=sizes.num_hidden_layers,
        context_length=max(LENGTHS),
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        eos_ids=(),
    )
    model = shard_class(info, layers)(copy.deepcopy(whole.config)).eval()
    missing = model.load_state_dict(whole.state_dict(), strict=False, assign=True).missing_keys
    assert not missing, f"parts have weights that the whole lacks: {missing}"
    model.set_attn_implementation(attention.name)
    model.set_experts_implementation(EXPERTS)
    return Shard(model, info, layers, CPU)


def forward_of(shard: Shard, attention: Attention, shapes: dict[int, KvShape]) -> Forward:
    """What runs it, with KV for the sequences."""
    kv = PagedKv(layers=shapes, num_blocks=len(LENGTHS), dtype=torch.float32)
    states = RecurrentStates(shard.recurrence.shapes, len(LENGTHS))
    return Forward(shard, attention, kv, RowPadding(buckets=frozenset()), states)


def in_one_step(stages: list[Forward], sequences: list[Tensor]) -> Tensor:
    """Returns the hidden states, float32 [T, H], of all rows, computed packed, each sequence whole,
    as encoders run."""
    spans = [Span(start=0, length=len(ids), blocks=[place]) for place, ids in enumerate(sequences)]
    x = torch.cat(sequences)
    for stage in stages:
        x = stage.hidden(spans, x)
    return x


def in_steps(stages: list[Forward], sequences: list[Tensor]) -> Tensor:
    """Returns the logits, float32 [T, V], of all rows, sequence by sequence, computed packed, chunk
    by chunk."""
    rows: list[list[Tensor]] = [[] for _ in sequences]
    for chunks in zip(*(pairwise(cuts) for cuts in CUTS), strict=True):
        spans = [
            Span(start=start, length=stop - start, blocks=[place], state=place)
            for place, (start, stop) in enumerate(chunks)
        ]
        x = torch.cat(
            [ids[start:stop] for ids, (start, stop) in zip(sequences, chunks, strict=True)]
        )
        for stage in stages:
            x = stage.sampled_outputs(spans, x, list(range(len(x))))
        for place, part in enumerate(x.split([span.length for span in spans])):
            rows[place].append(part)
    return torch.cat([part for parts in rows for part in parts])
