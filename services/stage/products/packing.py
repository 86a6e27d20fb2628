"""Replaces a model's linear layers by packed ones, layer by layer, and frees each original at once.

Layers of one input are one product: it reads the input once, and a wide product keeps a core busier
than a narrow one. Knows no attention and no scheduler.

Letters of shapes: T rows, K inputs and N outputs of a layer. Tensors have the dtype of the layer's
weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import structlog
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from services.stage.kernels.kernel import Kernel, Weights
from services.stage.products.experts import is_experts, pack_experts, stacked_weights
from services.stage.products.groups import INT4_BYTES, INT8_BYTES
from services.stage.products.stored import stored_of
from services.stage.products.tiled_linear import Int8Embedding, TiledEmbedding, TiledLinear
from services.stage.products.triton_products import TritonLinear, kernel_version
from shardline.base.errors import Invalid

log = structlog.get_logger(__name__)

MakeLayer = Callable[[Any, Tensor | None], TiledLinear | TritonLinear]
"""Makes a packed layer of a weight [N, K] and its bias [N]; in groups also of a list of weights, of
which some are in groups already."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How a shard's linear layers are packed. Without `make` they stay as they are."""

    name: str
    """For the exactness fingerprint: another packing gives other bits."""
    make: MakeLayer | None
    integers: Weights | None = None
    """The format of weights that become integers. Those of embedding and output layer have 8 bits
    in any case: in 4 the output layer alone costs 9 % of perplexity."""
    make_output: MakeLayer | None = None
    """For what stands outside of layers instead of `make`."""
    keeps_weights: bool = False
    """A packed layer uses the weight that it was given, which may be shared."""
    make_expert: MakeLayer | None = None
    """For experts of a mixture instead of `make`, of a weight that may stand for a stored one."""


UNPACKED = Packing("none", None)
_WEIGHTS = {torch.float32: Weights.FLOAT32, torch.bfloat16: Weights.BFLOAT16}
_INTEGER_BYTES = {Weights.INT8: 1.0, Weights.INT4: INT4_BYTES}
_OUTER = {Weights.INT8: Weights.INT8, Weights.INT4: Weights.GROUPED_INT8}
"""The format of embedding and output layer, by that of layers."""
_OUTER_BYTES = {Weights.INT8: 1.0, Weights.INT4: INT8_BYTES}
_NAMES = {Weights.INT4: "int4 with minimums and zero points"}
"""Where a format had other bits in a release before."""

_MERGED = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
"""Siblings that transformers' modules call on one input. Medians of 25 in turns on one core (Xeon
with AMX; 1,024 wide, 1,024 + 256 + 256 outputs): 0.79 of the time at 64 rows in bfloat16, 0.93 in
float32; 2 x 2,816 outputs: 0.97."""


def packing_for(
    dtype: torch.dtype, kernel: Kernel | None, integers: Weights | None = None
) -> Packing:
    """Returns how this processor packs layers of `dtype`, as `integers` if given. Raises Invalid if
    it cannot serve those."""
    if integers is not None and kernel is None:
        raise Invalid(
            "SHARDLINE_DTYPE",
            f"{integers.name.lower()} needs the CPU kernels, which this stage does not have",
            "Build them (python -m services.stage.kernels.build) on x86-64 with AVX2, "
            "or use bfloat16",
        )
    weights = _WEIGHTS.get(dtype) if integers is None else integers
    if kernel is not None and weights is not None:
        make = partial(TiledLinear, kernel, weights=weights)
        outer = None if integers is None else _OUTER[integers]
        make_output = None if outer is None else partial(TiledLinear, kernel, weights=outer)
        return Packing(_NAMES.get(weights, weights.name.lower()), make, integers, make_output)
    log.info("linear layers stay unpacked", dtype=str(dtype))
    return UNPACKED


def triton_packing() -> Packing:
    """Returns how a GPU runs linear layers through our Triton kernels, which read weights as they
    lie."""
    return Packing(kernel_version(), TritonLinear, keeps_weights=True)


class MergedLinear(nn.Module):
    """Linear layers of one input as one product. The first of them that is called computes them
    all."""

    def __init__(self, layers: list[nn.Linear], make: MakeLayer) -> None:
        super().__init__()
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        weights: list[Tensor] = [layer.weight for layer in layers]
        self.layer = _made(make, weights, torch.cat(biases) if biases else None)
        self.in_features = layers[0].in_features
        self.num_parts = len(layers)
        self._x: Tensor | None = None
        self._out: Tensor | None = None
        self._num_left = 0

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs of all layers side by side: x [..., T, K] to [..., T, sum of N], in
        the weights' dtype.

        The result is kept until each layer has been called with the same x.
        """
        if self._out is None or x is not self._x:
            self._x, self._out, self._num_left = x, self.layer(x), self.num_parts
        out = self._out
        self._num_left -= 1
        if not self._num_left:
            self._x = self._out = None
        return out


class Part(nn.Module):
    """One layer of a merged product."""

    def __init__(self, merged: MergedLinear, first: int, num: int) -> None:
        super().__init__()
        self.merged = merged
        self.first_output = first
        self.in_features = merged.in_features
        self.out_features = num

    @property
    def weight(self) -> Tensor:
        """A tensor of the weight's dtype, [0] or the whole product's [N, K]: some models ask a
        weight for its dtype or device."""
        return self.merged.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        """Returns x @ weight.T + bias: x [..., T, K] to [..., T, N], in the weight's dtype.

        The result is a view of the merged product: its rows are as far apart in memory as those of
        all parts together.
        """
        out: Tensor = self.merged(x)
        return out.narrow(-1, self.first_output, self.out_features)


def merged_layer(*parts: object) -> nn.Module | None:
    """Returns the product that computes these layers side by side, and nothing else; None if there
    is none."""
    products = {part.merged: part for part in parts if isinstance(part, Part)}
    (merged, *others) = products or [None]
    return None if merged is None or others or merged.num_parts != len(parts) else merged.layer


def packed_bytes(model: nn.Module, packing: Packing, *, in_ranks: bool = False) -> int:
    """Returns what the model's parameters will take: as integers, those of linear layers,
    embeddings and experts. An embedding in groups shares a tied output layer's memory, unless ranks
    divide it."""
    if packing.integers is None:
        return sum(parameter.nbytes for parameter in model.parameters())
    modules = list(model.modules())
    packed = {id(weight) for module in modules for weight in _weights(module)}
    outer = {id(module.weight) for module in modules if isinstance(module, nn.Embedding)}
    if isinstance(model, PreTrainedModel) and is_linear(output := model.get_output_embeddings()):
        outer.add(id(output.weight))

    outer_bytes = _OUTER_BYTES[packing.integers]

    def bytes_of(parameter: Tensor) -> int:
        if id(parameter) not in packed:
            return parameter.nbytes
        if id(parameter) not in outer:
            return _bytes_of(parameter, packing)
        return math.ceil(parameter.numel() * outer_bytes)

    shared = 0
    if packing.integers is Weights.INT4 and not in_ranks and _is_tied(model):
        # A skeleton has both.
        weights = {id(each): each for each in model.parameters() if id(each) in outer & packed}
        shared = sum(map(bytes_of, weights.values())) // 2 if len(weights) == 2 else 0
    return sum(map(bytes_of, model.parameters())) - shared


def _is_tied(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    return bool(getattr(config, "tie_word_embeddings", False))


def tiled_bytes(module: nn.Module, packing: Packing) -> int:
    """Returns the part of `packed_bytes` that tiles of our own will take; a GPU's products have
    none."""
    if packing.make is None or packing.keeps_weights:
        return 0
    weights = [
        weight
        for each in module.modules()
        if not isinstance(each, nn.Embedding)
        for weight in _weights(each)
    ]
    return sum(_bytes_of(weight, packing) for weight in weights)


def _bytes_of(weight: Tensor, packing: Packing) -> int:
    """What a weight takes that is packed."""
    if packing.integers is None:
        return weight.nbytes
    if (stored := stored_of(weight)) is not None:
        return stored.num_bytes
    return math.ceil(weight.numel() * _INTEGER_BYTES[packing.integers])


def _weights(module: nn.Module) -> list[Tensor]:
    """The weights of a module that become integers; but for an embedding's they become tiles."""
    if is_experts(module):
        return [stacked for _, stacked in stacked_weights(module)]
    return (
        [module.get_parameter("weight")]
        if type(module) in {nn.Linear, Conv1D, nn.Embedding}
        else []
    )


@torch.no_grad()
def pack(model: nn.Module, packing: Packing, *, uses_embedding: bool = True) -> None:
    """Packs the model's linear layers and experts one by one and frees each original at once.

    An output layer tied to the embedding stays plain: a packed copy would cost its size again
    (fp32: 38 % off its time at 64 rows; bf16: 20 %). With `uses_embedding=False` (a tail that never
    looks tokens up) it is packed instead, and so it is by a packing that keeps weights, which needs
    no copy.
    """
    if packing.make is not None and not packing.keeps_weights:
        for experts in filter(is_experts, model.modules()):
            pack_experts(experts, packing.make_expert or partial(expert_of, packing.make))
    groups = list(_groups(model))
    if packing.make is None or not groups:
        return
    tied = None if packing.keeps_weights else _tied_embedding(model)
    while groups:
        _pack_group(*groups.pop(), packing.make, skipped=tied if uses_embedding else None)
    if tied is not None and not uses_embedding:
        tied.data = torch.empty(0, dtype=tied.dtype)


@torch.no_grad()
def unshare_embedding(model: Any, packing: Packing) -> None:
    """Gives the embedding a separate weight, integers if the packing has some, so that a tied
    output layer can be packed. In groups it shares that layer's, which then is packed too.

    An embedding of another kind than torch's own may do more in its forward: it keeps its dtype.
    """
    embedding = model.get_input_embeddings()
    if type(embedding) is not nn.Embedding or packing.integers is None:
        own = embedding.weight.detach().clone()
        if (stored := stored_of(embedding.weight)) is not None:
            own = stored.groups().floats().to(own.dtype)
        embedding.weight = nn.Parameter(own, requires_grad=False)
    elif packing.integers is not Weights.INT4:
        model.set_input_embeddings(Int8Embedding(embedding.weight))
    else:
        assert packing.make_output is not None
        layer = _made(packing.make_output, [embedding.weight], None)
        output = model.get_output_embeddings()
        if is_linear(output) and output.weight is embedding.weight and output.bias is None:
            model.set_output_embeddings(layer)
        model.set_input_embeddings(TiledEmbedding(layer))


def is_linear(module: object) -> TypeGuard[nn.Linear | Conv1D]:
    """Whether it is of exactly these types: a subclass may do more in its forward, or be read as a
    bare weight."""
    return type(module) in {nn.Linear, Conv1D}


def _groups(model: nn.Module) -> Iterator[tuple[nn.Module, list[tuple[str, nn.Linear | Conv1D]]]]:
    """Yields each parent's linear layers by name: those that can be one product together, every
    other one alone."""
    for parent in model.modules():
        layers = {name: child for name, child in parent.named_children() if is_linear(child)}
        for names in _MERGED:
            if _can_merge([layers.get(name) for name in names]):
                yield parent, [(name, layers.pop(name)) for name in names]
        yield from ((parent, [one]) for one in layers.items())


def _can_merge(layers: list[nn.Linear | Conv1D | None]) -> bool:
    kinds = {
        (layer.in_features, layer.bias is None, layer.weight.dtype, _order_of(layer.weight))
        for layer in layers
        if type(layer) is nn.Linear
    }
    return all(type(layer) is nn.Linear for layer in layers) and len(kinds) == 1


def _order_of(weight: Tensor) -> tuple[int, ...] | None:
    """The inputs at the places of a stored weight; layers with unlike ones are no single
    product."""
    stored = stored_of(weight)
    order = None if stored is None else stored.order
    return None if order is None else tuple(order.tolist())


def _pack_group(
    parent: nn.Module,
    layers: list[tuple[str, nn.Linear | Conv1D]],
    make: MakeLayer,
    *,
    skipped: Tensor | None,
) -> None:
    name, layer = layers[0]
    if len(layers) == 1:
        if layer.weight is not skipped:
            weight = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
            setattr(parent, name, _made(make, [weight], layer.bias))
        return
    merged = MergedLinear([layer for _, layer in layers if isinstance(layer, nn.Linear)], make)
    first = 0
    for name, layer in layers:
        num = layer.weight.shape[0]
        setattr(parent, name, Part(merged, first, num))
        first += num


def expert_of(make: MakeLayer, weight: Tensor, bias: Tensor | None) -> Any:
    """Returns a packed layer of a weight [N, K] and a bias [N] of one float dtype: of a stored
    weight the numbers are read."""
    return _made(make, [weight], bias)


def _made(make: MakeLayer, weights: Sequence[Tensor], bias: Tensor | None) -> Any:
    """A layer of weights [N, K] side by side: of stored ones the numbers are read."""
    stored = [stored_of(weight) for weight in weights]
    if not any(stored):
        return make(weights[0] if len(weights) == 1 else torch.cat(list(weights)), bias)
    pairs = zip(weights, stored, strict=True)
    made = make([weight if each is None else each.groups() for weight, each in pairs], bias)
    order = None if stored[0] is None else stored[0].order
    if order is not None:
        assert isinstance(made, TiledLinear)
        made.order_inputs(order)
    return made


def _tied_embedding(model: nn.Module) -> Tensor | None:
    """The embedding's weight, if a linear layer shares it."""
    shared = {id(layer.weight) for layer in model.modules() if is_linear(layer)}
    embeddings = (module.weight for module in model.modules() if isinstance(module, nn.Embedding))
    return next((weight for weight in embeddings if id(weight) in shared), None)
