"""Gives each rank of a stage its share of a shard's layers: some outputs of every product, some attention heads.

What the ranks compute is put together before anything needs all of it, so each has the same hidden states, with the
bits of a shard that one process holds. The model's tensor-parallel plan in transformers says which layers keep their
outputs to themselves; the outputs of every other layer come together at once.

Letters of shapes: T rows, K inputs and N outputs of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from services.stage.model.experts import is_experts
from services.stage.model.packing import MakeLayer, is_linear
from services.stage.model.shard import Shard
from services.stage.model.tiled_linear import TILE_OUTPUTS
from services.stage.ranks.group import RankGroup

KEPT, TAKES_KEPT = "colwise", "rowwise"
"""transformers' words for a layer whose outputs stay on their rank, and for one whose inputs did."""


class GatheredLinear(nn.Module):
    """A linear layer of which each rank has some outputs; it gives all."""

    def __init__(self, group: RankGroup, linear: Any, num_outputs: int, *, gathers_input: bool) -> None:
        """`linear` has this rank's outputs. With `gathers_input` each rank has only its share of the inputs."""
        super().__init__()
        self.linear, self.gathers_input = linear, gathers_input
        self.in_features: int = linear.in_features
        self.out_features = num_outputs
        self._group = group

    @property
    def weight(self) -> Tensor:
        """A tensor, [0] or [n, K], of the weight's dtype: some models ask a weight for its dtype or device."""
        linear: Any = self.linear
        weight: Tensor = linear.weight
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """Returns x @ weight.T + bias [..., T, N] for x [..., T, K], or this rank's share of it, in one dtype."""
        if self.gathers_input:
            x = self._group.gather(x, self.in_features)
        return self._group.gather(self.linear(x), self.out_features)


class SentEmbedding(nn.Module):
    """The embedding of a head's ranks, on the first, which looks up for all."""

    def __init__(self, group: RankGroup, embedding: nn.Module) -> None:
        super().__init__()
        self._group, self.embedding = group, embedding

    @property
    def weight(self) -> Tensor:
        """The embedding's own, [V, H] or [0], in the dtype of outputs: some models ask a weight for its dtype."""
        embedding: Any = self.embedding
        weight: Tensor = embedding.weight
        return weight

    def forward(self, ids: Tensor) -> Tensor:
        """Looks up ids int64 [...]; returns [..., H] in the dtype of the weight, H the width of the embedding."""
        states: Tensor = self.embedding(ids)
        self._group.send(states)
        return states


class ReceivedEmbedding(nn.Module):
    """The same on other ranks, which hold no weight of it."""

    def __init__(self, group: RankGroup, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._group, self._width, self._empty = group, width, torch.empty(0, dtype=dtype)

    @property
    def weight(self) -> Tensor:
        """An empty tensor [0] of the dtype of outputs: some models ask a weight for its dtype or device."""
        return self._empty

    def forward(self, ids: Tensor) -> Tensor:
        """Returns what the first rank has looked up for ids int64 [...]."""
        return self._group.receive((*ids.shape, self._width), self._empty.dtype)


def split_shard(shard: Shard, group: RankGroup) -> None:
    """Replaces a shard's linear layers, which must not be packed yet, by this rank's shares of them.

    Experts are divided by `gathered`, as they are packed.
    """
    plan = dict(shard.info.config.base_model_tp_plan or {})
    names = {module: name for name, module in shard.decoder.named_modules()}
    for layer in shard.layer_modules.values():
        for parent in list(layer.modules()):
            if not is_experts(parent):
                _split_children(parent, names[parent], plan, group)
    shard.widths |= {width // group.num_ranks for width in shard.widths if width % group.num_ranks == 0}
    if shard.is_last:
        _split_output(shard, group)


def send_embedding(model: Any, group: RankGroup) -> None:
    """Leaves the embedding of a model to the first rank; call it when that has packed it."""
    embedding = model.get_input_embeddings()
    if group.rank == 0:
        model.set_input_embeddings(SentEmbedding(group, embedding))
    else:
        model.set_input_embeddings(ReceivedEmbedding(group, embedding.weight.shape[-1], embedding.weight.dtype))


def gathered(make: MakeLayer, group: RankGroup) -> MakeLayer:
    """Returns what makes this rank's share of a packed layer, which gives all outputs, of a whole weight [N, K]."""

    def make_share(weight: Tensor, bias: Tensor | None) -> Any:
        share = group.share_of(len(weight))
        mine = make(weight[share.start : share.stop], None if bias is None else bias[share.start : share.stop])
        return GatheredLinear(group, mine, len(weight), gathers_input=False)

    return make_share


def widest(shard: Shard) -> int:
    """Returns the most numbers of a row that ranks put together in a layer."""
    layers = (each for layer in shard.layer_modules.values() for each in layer.modules())
    found = [max(each.in_features, each.out_features) for each in layers if isinstance(each, GatheredLinear)]
    return max([shard.info.hidden_size, *found])


def _split_children(parent: Any, name: str, plan: Mapping[str, str], group: RankGroup) -> None:
    linears = {child: module for child, module in parent.named_children() if is_linear(module)}
    kinds = {child: plan.get(re.sub(r"\.\d+", ".*", f"{name}.{child}")) for child in linears}
    keeps = _can_keep(parent, [linears[child] for child, kind in kinds.items() if kind == KEPT], group)
    for child, linear in linears.items():
        if keeps and kinds[child] == KEPT:
            setattr(parent, child, _share(linear, group))
        elif group.num_ranks <= _num_outputs(linear) // TILE_OUTPUTS or kinds[child] == TAKES_KEPT:
            takes_kept = keeps and kinds[child] == TAKES_KEPT
            setattr(parent, child, _gathered_linear(linear, group, gathers_input=takes_kept))


def _can_keep(parent: Any, linears: list[nn.Linear | Conv1D], group: RankGroup) -> bool:
    """Whether outputs of these layers can stay on their ranks: equal shares, of whole attention heads, and nothing that
    `parent` keeps for each of them itself."""
    if next(parent.parameters(recurse=False), None) is not None:
        return False
    head_dim = getattr(parent, "head_dim", None) if hasattr(parent, "layer_idx") else None
    unit = head_dim if isinstance(head_dim, int) else 1
    return all(_num_outputs(linear) % (unit * group.num_ranks) == 0 for linear in linears)


def _split_output(shard: Shard, group: RankGroup) -> None:
    output, embedding = shard.model.get_output_embeddings(), shard.model.get_input_embeddings()
    if not is_linear(output):
        return
    is_tied = getattr(embedding, "weight", None) is output.weight
    shard.model.set_output_embeddings(_gathered_linear(output, group, gathers_input=False))
    if is_tied and not shard.is_first:
        embedding.weight.data = torch.empty(0, dtype=shard.dtype)


def _gathered_linear(linear: nn.Linear | Conv1D, group: RankGroup, *, gathers_input: bool) -> GatheredLinear:
    return GatheredLinear(group, _share(linear, group), _num_outputs(linear), gathers_input=gathers_input)


def _share(linear: nn.Linear | Conv1D, group: RankGroup) -> nn.Linear:
    """A layer of this rank's outputs, of the memory of the whole one."""
    weight = linear.weight.T if isinstance(linear, Conv1D) else linear.weight
    share = group.share_of(len(weight))
    mine = nn.Linear(weight.shape[1], len(share), bias=linear.bias is not None, device="meta")
    mine.weight = nn.Parameter(weight[share.start : share.stop], requires_grad=False)
    if linear.bias is not None:
        mine.bias = nn.Parameter(linear.bias[share.start : share.stop], requires_grad=False)
    return mine


def _num_outputs(linear: nn.Linear | Conv1D) -> int:
    num: int = linear.nf if isinstance(linear, Conv1D) else linear.out_features
    return num
