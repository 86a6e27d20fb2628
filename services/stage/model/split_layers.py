"""Gives each rank of a stage its share of a shard's layers: some outputs of every product, some
attention heads.

What the ranks compute is put together before anything needs all of it, so each has the same hidden
states, with the bits of a shard that one process holds. The model's tensor-parallel plan in
transformers tells which layers keep their outputs to themselves; the outputs of every other layer
come together at once.

Letters of shapes: T rows, K inputs and N outputs of a layer.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from services.stage.model.refusal import refuse
from services.stage.model.shard import Shard, row_lengths
from services.stage.products.experts import is_experts
from services.stage.products.packing import MakeLayer, expert_of, is_linear
from services.stage.products.stored import keep, stored_of
from services.stage.products.tiled_linear import TILE_OUTPUTS
from services.stage.ranks.group import RankGroup

KEPT = "colwise"
TAKES_KEPT = "rowwise"
"""transformers' words for a layer with outputs that stay on their rank, and for one with such
inputs."""


class Share(NamedTuple):
    """Which of some numbers are a rank's."""

    mine: range
    num: int


class GatheredLinear(nn.Module):
    """A linear layer of which each rank has some outputs; it gives all."""

    def __init__(
        self, group: RankGroup, linear: Any, outputs: Share, inputs: Share | None = None
    ) -> None:
        """`linear` has this rank's share of the outputs. With `inputs` each rank has only its share
        of those."""
        super().__init__()
        self.linear = linear
        self.inputs = inputs
        self.outputs = outputs
        self.in_features: int = linear.in_features
        self.out_features = outputs.num
        self._group = group

    @property
    def weight(self) -> Tensor:
        """A tensor, [0] or [n, K], of the weight's dtype: some models ask a weight for its dtype or
        device."""
        linear: Any = self.linear
        weight: Tensor = linear.weight
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """Returns x @ weight.T + bias [..., T, N] for x [..., T, K], or this rank's share of it, in
        one dtype."""
        if self.inputs is not None:
            x = self._group.gather(x, *self.inputs)
        return self._group.gather(self.linear(x), *self.outputs)


class SentEmbedding(nn.Module):
    """The embedding of a head's ranks, on the first, which looks up for all."""

    def __init__(self, group: RankGroup, embedding: nn.Module) -> None:
        super().__init__()
        self._group = group
        self.embedding = embedding

    @property
    def weight(self) -> Tensor:
        """The embedding's own, [V, H] or [0], in the dtype of outputs: some models ask a weight for
        its dtype."""
        embedding: Any = self.embedding
        weight: Tensor = embedding.weight
        return weight

    def forward(self, ids: Tensor) -> Tensor:
        """Looks up ids int64 [...]; returns [..., H] in the dtype of the weight, H the width of the
        embedding."""
        states: Tensor = self.embedding(ids)
        self._group.send(states)
        return states


class ReceivedEmbedding(nn.Module):
    """The same on other ranks, which hold no weight of it."""

    def __init__(self, group: RankGroup, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._group = group
        self._width = width
        self._empty = torch.empty(0, dtype=dtype)

    @property
    def weight(self) -> Tensor:
        """An empty tensor [0] of the dtype of outputs: some models ask a weight for its dtype or
        device."""
        return self._empty

    def forward(self, ids: Tensor) -> Tensor:
        """Returns what the first rank has looked up for ids int64 [...]."""
        return self._group.receive((*ids.shape, self._width), self._empty.dtype)


def split_shard(shard: Shard, group: RankGroup) -> None:
    """Replaces a shard's linear layers, which must not be packed yet, by this rank's shares of
    them.

    Experts are divided by `gathered`, as they are packed. Raises Invalid for recurrent layers.
    """
    if shard.recurrence.shapes:
        refuse("it has recurrent layers, which ranks do not divide", "Set SHARDLINE_TP to 1")
    names = {module: name for name, module in shard.model.named_modules()}
    splitter = _Splitter(shard, group, f"{names[shard.decoder]}.")
    for layer in shard.layer_modules.values():
        for parent in list(layer.modules()):
            if not is_experts(parent):
                splitter.split(parent, names[parent])
    shard.widths |= row_lengths(shard.layer_modules.values())
    if shard.is_last:
        _split_output(shard, group)


def send_embedding(model: Any, group: RankGroup) -> None:
    """Leaves the embedding of a model to the first rank; call it when that has packed it."""
    embedding = model.get_input_embeddings()
    if group.rank == 0:
        model.set_input_embeddings(SentEmbedding(group, embedding))
    else:
        model.set_input_embeddings(
            ReceivedEmbedding(group, embedding.weight.shape[-1], embedding.weight.dtype)
        )


def gathered(make: MakeLayer, group: RankGroup) -> MakeLayer:
    """Returns what makes this rank's share of a packed layer, which gives all outputs, of a whole
    weight [N, K], which may stand for a stored one."""

    def make_share(weight: Tensor, bias: Tensor | None) -> Any:
        if not group.can_share(len(weight), TILE_OUTPUTS):
            return expert_of(make, weight, bias)
        share = group.share_of(len(weight), TILE_OUTPUTS)
        rows = weight[share.start : share.stop]
        if (stored := stored_of(weight)) is not None:
            keep(rows, stored.rows(share))
        mine = expert_of(make, rows, None if bias is None else bias[share.start : share.stop])
        return GatheredLinear(group, mine, Share(share, len(weight)))

    return make_share


def widest(shard: Shard) -> int:
    """Returns the most numbers of a row that ranks put together in a layer."""
    layers = (each for layer in shard.layer_modules.values() for each in layer.modules())
    found = [
        max(each.in_features, each.out_features)
        for each in layers
        if isinstance(each, GatheredLinear)
    ]
    return max([shard.info.hidden_size, *found])


class _Splitter:
    """Replaces the linear layers of one parent after the other."""

    def __init__(self, shard: Shard, group: RankGroup, prefix: str) -> None:
        """`prefix` is what names in the model have before those in its decoder, which the plan
        has."""
        config = shard.info.text_config
        self._group = group
        self._prefix = prefix
        self._shares = shard.output_shares
        self._plan = dict(config.base_model_tp_plan or {})
        self._num_heads = config.num_attention_heads

    def split(self, parent: Any, name: str) -> None:
        """Divides its own linear layers; `name` is its own in the model."""
        linears = {child: module for child, module in parent.named_children() if is_linear(module)}
        of_plan = re.sub(r"\.\d+", ".*", name.removeprefix(self._prefix))
        kinds = {child: self._plan.get(f"{of_plan}.{child}") for child in linears}
        kept, takers = (
            [linears[child] for child, kind in kinds.items() if kind == each]
            for each in (KEPT, TAKES_KEPT)
        )
        # A layer that stays whole needs all of its inputs
        can_take = all(self._group.can_share(_num_outputs(taker), TILE_OUTPUTS) for taker in takers)
        num_units = self._num_units(parent, kept) if can_take else None
        for child, linear in linears.items():
            if num_units is not None and kinds[child] == KEPT:
                share = self._group.share_of(
                    _num_outputs(linear), _num_outputs(linear) // num_units
                )
                setattr(parent, child, _rows_of(linear, share))
                self._shares[f"{name}.{child}"] = share
            elif self._group.can_share(_num_outputs(linear), TILE_OUTPUTS):
                takes_kept = num_units is not None and kinds[child] == TAKES_KEPT
                mine = _gathered_linear(linear, self._group, num_units if takes_kept else None)
                setattr(parent, child, mine)
                self._shares[f"{name}.{child}"] = mine.outputs.mine

    def _num_units(self, parent: Any, linears: list[nn.Linear | Conv1D]) -> int | None:
        """Returns into how many parts, each of them some outputs of all these layers, ranks may
        divide what they keep: KV heads with their queries, or tiles. None if they cannot."""
        if not linears or next(parent.parameters(recurse=False), None) is not None:
            return None  # nothing to keep, or `parent` has weights itself for each of the outputs
        sizes = [_num_outputs(linear) for linear in linears]
        if not hasattr(parent, "layer_idx"):
            num = (
                sizes[0] // TILE_OUTPUTS
                if len(set(sizes)) == 1 and sizes[0] % TILE_OUTPUTS == 0
                else 1
            )
        elif isinstance(head_dim := getattr(parent, "head_dim", None), int):
            num = math.gcd(*sizes) // head_dim if all(size % head_dim == 0 for size in sizes) else 1
        else:
            num = self._num_heads if all(size % self._num_heads == 0 for size in sizes) else 1
        return num if self._group.can_share(num) else None


def _split_output(shard: Shard, group: RankGroup) -> None:
    output = shard.model.get_output_embeddings()
    embedding = shard.model.get_input_embeddings()
    if not is_linear(output) or not group.can_share(_num_outputs(output), TILE_OUTPUTS):
        return
    is_tied = getattr(embedding, "weight", None) is output.weight
    shard.model.set_output_embeddings(_gathered_linear(output, group))
    if is_tied and not shard.is_first:
        embedding.weight.data = torch.empty(0, dtype=shard.dtype)


def _gathered_linear(
    linear: nn.Linear | Conv1D, group: RankGroup, num_units: int | None = None
) -> GatheredLinear:
    """Returns the layer, of which this rank computes its share. `num_units`: the inputs lie on the
    ranks in shares of that many units."""
    num_outputs = _num_outputs(linear)
    outputs = Share(group.share_of(num_outputs, TILE_OUTPUTS), num_outputs)
    inputs = None
    mine = _rows_of(linear, outputs.mine)
    if num_units is not None:
        inputs = Share(
            group.share_of(mine.in_features, mine.in_features // num_units), mine.in_features
        )
    return GatheredLinear(group, mine, outputs, inputs)


def _rows_of(linear: nn.Linear | Conv1D, share: range) -> nn.Linear:
    """A layer of some of its outputs, of the memory of the whole one."""
    weight = linear.weight.T if isinstance(linear, Conv1D) else linear.weight
    mine = nn.Linear(weight.shape[1], len(share), bias=linear.bias is not None, device="meta")
    mine.weight = nn.Parameter(weight[share.start : share.stop], requires_grad=False)
    if (stored := stored_of(linear.weight)) is not None:
        keep(mine.weight, stored.rows(share))
    if linear.bias is not None:
        mine.bias = nn.Parameter(linear.bias[share.start : share.stop], requires_grad=False)
    return mine


def _num_outputs(linear: nn.Linear | Conv1D) -> int:
    num: int = linear.nf if isinstance(linear, Conv1D) else linear.out_features
    return num
