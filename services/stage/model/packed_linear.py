"""Linear layers on CPU with packed weights, which see only the numbers of rows in their buckets.

Layers of one input are one product: it reads the input once, and a wide product keeps a core busier than a narrow one.
Knows no attention and no scheduler. Packing uses torch's private mkldnn operators: without them, layers stay as they
are.

Letters of shapes: T rows, K inputs and N outputs of a layer. Tensors are float32 or bfloat16, as the weight is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard

import structlog
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from services.stage.model.row_buckets import Buckets, in_panels
from services.stage.model.row_counts import SAMPLED_OUTPUTS

_log = structlog.get_logger(__name__)

_reorder = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_has_bfloat16 = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)

_MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Siblings that transformers' modules call on one input. Medians of 25 in turns on one core (Xeon with AMX; 1,024 wide,
1,024 + 256 + 256 outputs): 0.79 of the time at 64 rows in bfloat16, 0.93 in float32; 2 x 2,816 outputs: 0.97."""

_EXPECTED_ROWS = 32
"""oneDNN picks its layout for this number of rows. From 2 to 512 the same speed was measured."""


class PackedLinear(nn.Module):
    """A linear layer whose weight is stored in oneDNN's layout; the original is not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        assert _reorder is not None, "ask can_pack first"
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed = _reorder(weight.detach().contiguous(), _EXPECTED_ROWS)
        self.sample: Tensor | None = weight.detach()[:SAMPLED_OUTPUTS].clone()
        """Some rows [S, K] of the weight, kept until its buckets are known."""
        self._buckets: Buckets = ()
        self._empty = torch.empty(0, dtype=weight.dtype)

    @property
    def weight(self) -> Tensor:
        """An empty tensor [0] of the weight's dtype: some models ask a weight for its dtype or device."""
        return self._empty

    def forward(self, x: Tensor) -> Tensor:
        """Returns x @ weight.T + bias: x [..., T, K] to [..., T, N], in the weight's dtype."""
        rows = x if x.numel() == x.shape[-2] * x.shape[-1] else x.reshape(-1, x.shape[-1])
        out: Tensor = in_panels(self.product, rows, self._buckets)
        return out if rows is x else out.reshape(*x.shape[:-1], -1)

    def use_buckets(self, buckets: Buckets) -> None:
        """Makes `forward` run only these numbers of rows from now on."""
        self._buckets, self.sample = buckets, None

    def product(self, x: Tensor) -> Tensor:
        """Returns x @ weight.T + bias in one call, whatever the number of rows: x [..., T, K] to [..., T, N], in the
        weight's dtype."""
        assert _linear is not None, "ask can_pack first"
        return _linear(x, self.packed, self.bias, "none", [], "")


class Merged(nn.Module):
    """Linear layers of one input as one product. The first of them that is called computes them all."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        weights: list[Tensor] = [layer.weight for layer in layers]
        self.layer = PackedLinear(torch.cat(weights), torch.cat(biases) if biases else None)
        self.in_features, self._num_parts = layers[0].in_features, len(layers)
        self._x: Tensor | None = None
        self._out: Tensor | None = None
        self._num_left = 0

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs of all layers side by side: x [..., T, K] to [..., T, sum of N], in the weights' dtype.

        The result is kept until each layer has been called with the same x.
        """
        if self._out is None or x is not self._x:
            self._x, self._out, self._num_left = x, self.layer(x), self._num_parts
        out = self._out
        self._num_left -= 1
        if not self._num_left:
            self._x = self._out = None
        return out


class Part(nn.Module):
    """One layer of a merged product."""

    def __init__(self, merged: Merged, first: int, num: int) -> None:
        super().__init__()
        self.merged, self._first = merged, first
        self.in_features, self.out_features = merged.in_features, num

    @property
    def weight(self) -> Tensor:
        """An empty tensor [0] of the weight's dtype: some models ask a weight for its dtype or device."""
        return self.merged.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        """Returns x @ weight.T + bias: x [..., T, K] to [..., T, N], in the weight's dtype.

        The result is a view of the merged product: its rows are as far apart in memory as those of all parts together.
        """
        out: Tensor = self.merged(x)
        return out.narrow(-1, self._first, self.out_features)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch and this processor run packed linear layers of `dtype`."""
    if device.type != "cpu" or _reorder is None or _linear is None or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and _has_bfloat16 is not None and bool(_has_bfloat16()))


@torch.no_grad()
def pack(model: nn.Module, *, uses_embedding: bool = True) -> bool:
    """Packs the model's linear layers one by one and frees each original at once. Returns False if none can be packed.

    An output layer tied to the embedding stays plain: a packed copy would cost its size again (fp32: 38 % off its time
    at 64 rows; bf16: 20 %). With `uses_embedding=False` (a tail that never looks tokens up) it is packed instead.
    """
    groups = list(_groups(model))
    weight = next((layer.weight for layer in model.modules() if _is_linear(layer)), torch.empty(0))
    if not groups or not can_pack(weight.dtype, weight.device):
        _log.info("linear layers stay unpacked", dtype=str(weight.dtype), device=str(weight.device))
        return False
    del weight
    tied = _tied_embedding(model)
    while groups:
        _pack_group(*groups.pop(), skipped=tied if uses_embedding else None)
    if tied is not None and not uses_embedding:
        tied.data = torch.empty(0, dtype=tied.dtype)
    return True


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear | Conv1D]:
    """Exactly these types: a subclass may do more in its forward, or be read as a bare weight."""
    return type(module) in {nn.Linear, Conv1D}


def _groups(model: nn.Module) -> Iterator[tuple[nn.Module, list[tuple[str, nn.Linear | Conv1D]]]]:
    """Yields each parent's linear layers by name: those that can be one product together, every other one alone."""
    for parent in model.modules():
        layers = {name: child for name, child in parent.named_children() if _is_linear(child)}
        for names in _MERGED:
            if _can_merge([layers.get(name) for name in names]):
                yield parent, [(name, layers.pop(name)) for name in names]
        yield from ((parent, [one]) for one in layers.items())


def _can_merge(layers: list[nn.Linear | Conv1D | None]) -> bool:
    kinds = {
        (layer.in_features, layer.bias is None, layer.weight.dtype) for layer in layers if type(layer) is nn.Linear
    }
    return all(type(layer) is nn.Linear for layer in layers) and len(kinds) == 1


def _pack_group(parent: nn.Module, layers: list[tuple[str, nn.Linear | Conv1D]], *, skipped: Tensor | None) -> None:
    name, layer = layers[0]
    if len(layers) == 1:
        if layer.weight is not skipped:
            weight = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
            setattr(parent, name, PackedLinear(weight, layer.bias))
        return
    merged, first = Merged([layer for _, layer in layers if isinstance(layer, nn.Linear)]), 0
    for name, layer in layers:
        num = layer.weight.shape[0]
        setattr(parent, name, Part(merged, first, num))
        first += num


def _tied_embedding(model: nn.Module) -> Tensor | None:
    """The embedding's weight, if a linear layer shares it."""
    shared = {id(layer.weight) for layer in model.modules() if _is_linear(layer)}
    embeddings = (module.weight for module in model.modules() if isinstance(module, nn.Embedding))
    return next((weight for weight in embeddings if id(weight) in shared), None)
