"""Tries on a model's miniature whether ranks compute what the whole model does, each in a thread of
this process."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.stage.attention.attention import Attention
from services.stage.engine.loading import pack_shard
from services.stage.engine.split_trial import forward_of, in_steps, shard_of, try_miniature
from services.stage.kernels.kernel import Kernel
from services.stage.model.kv_shapes import probe_kv_shapes
from services.stage.model.split_layers import gathered, split_shard
from services.stage.model.text_part import text_config
from services.stage.products.packing import packing_for
from services.stage.ranks.group import RankGroup

BUFFER_BYTES = 1 << 20


def check_ranks(config: Any, cache_folder: Path, native: Kernel, num_ranks: int) -> None:
    """Raises Invalid, with the reason, if `num_ranks` ranks of a model of this config would compute
    something else than the whole model. A model that passed is not tried again."""
    try_miniature(config, cache_folder, f"{num_ranks} ranks", partial(in_ranks, native, num_ranks))


def in_ranks(native: Kernel, num_ranks: int, whole: Any, sequences: list[Tensor]) -> Tensor:
    """Returns the logits [T, V] that ranks, each a thread, compute with a whole model of float32; T
    as `sequences`, ids int64 [length], lie one behind the other."""
    memory = os.memfd_create("shardline-rank-trial")
    groups = [RankGroup(rank, num_ranks, memory) for rank in range(num_ranks)]
    with closing(os.fdopen(memory)), ThreadPoolExecutor(num_ranks) as pool:
        first, *_ = list(pool.map(lambda group: _rank(native, whole, sequences, group), groups))
    return first


@torch.inference_mode()
def _rank(native: Kernel, whole: Any, sequences: list[Tensor], group: RankGroup) -> Tensor:
    """What one rank computes: the logits [T, V]."""
    group.open(native, BUFFER_BYTES)
    try:
        attention = Attention(None)
        packing = packing_for(torch.float32, native)
        assert packing.make is not None
        num_layers = text_config(whole.config).num_hidden_layers
        shard = shard_of(whole, range(num_layers), attention)
        split_shard(shard, group)
        shapes = probe_kv_shapes(shard)
        pack_shard(shard, replace(packing, make_expert=gathered(packing.make, group)), group=group)
        return in_steps([forward_of(shard, attention, shapes)], sequences)
    finally:
        group.leave()
