"""Linear layers on CPU: packed weights, and how many rows a matmul must see for a row's bits to be its own.

Knows no attention and no scheduler. Packing uses torch's private mkldnn operators: without them, layers stay as they
are.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import TypeGuard

import structlog
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from services.stage.engine.padding import rung

_log = structlog.get_logger(__name__)

_reorder = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_has_bfloat16 = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)

_EXPECTED_ROWS = 32
"""oneDNN picks its layout for this batch. From 2 to 512 the same speed was measured."""

FEWEST_ROWS = 2
"""A single row goes through another oneDNN kernel. In bf16 rounding hides that so often that a probe may not see it."""

_PROBED_ROWS = sorted({rung(num_rows) for num_rows in range(FEWEST_ROWS, 65)})
"""No other numbers are ever run."""
_PROBED_PLACES = 16
"""Rows to compare at least for each size, for the same reason."""
_REFERENCE_ROWS = 96


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in oneDNN's layout; the original is not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        assert _reorder is not None, "ask can_pack first"
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed = _reorder(weight.detach().contiguous(), _EXPECTED_ROWS)
        self._empty = torch.empty(0, dtype=weight.dtype)

    @property
    def weight(self) -> Tensor:
        """Holds nothing: some models ask it for its dtype or device."""
        return self._empty

    def forward(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias."""
        assert _linear is not None, "ask can_pack first"
        return _linear(x, self.packed, self.bias, "none", [], "")


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """True where this torch and this processor run packed linears of `dtype`."""
    if device.type != "cpu" or _reorder is None or _linear is None or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and _has_bfloat16 is not None and bool(_has_bfloat16()))


@torch.no_grad()
def pack(model: nn.Module, *, uses_embedding: bool = True) -> bool:
    """Packs the model's linear layers one by one, each original freed at once. False where nothing could be packed.

    An output layer tied to the embedding stays plain: a packed copy would cost its size again (fp32: 38 % off its time
    at 64 rows; bf16: 20 %). With `uses_embedding=False` (a tail that never looks tokens up) it is packed instead.
    """
    linears = _linears(model)
    weight = linears[0][2].weight if linears else torch.empty(0)
    if not linears or not can_pack(weight.dtype, weight.device):
        _log.info("linear layers stay unpacked", dtype=str(weight.dtype), device=str(weight.device))
        return False
    del weight
    tied = _tied_embedding(model)
    while linears:
        parent, name, layer = linears.pop()
        if layer.weight is tied and uses_embedding:
            continue
        setattr(parent, name, PackedLinear(layer.weight.T if isinstance(layer, Conv1D) else layer.weight, layer.bias))
    if tied is not None and not uses_embedding:
        tied.data = torch.empty(0, dtype=tied.dtype)
    return True


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear | Conv1D]:
    """Exactly these types: a subclass may do more in its forward, or be read as a bare weight."""
    return type(module) in {nn.Linear, Conv1D}


def _linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear | Conv1D]]:
    children = ((parent, name, child) for parent in model.modules() for name, child in parent.named_children())
    return [(parent, name, child) for parent, name, child in children if _is_linear(child)]


def _tied_embedding(model: nn.Module) -> Tensor | None:
    """The embedding's weight, if a linear layer shares it."""
    shared = {id(layer.weight) for _, _, layer in _linears(model)}
    embeddings = (module.weight for module in model.modules() if isinstance(module, nn.Embedding))
    return next((weight for weight in embeddings if id(weight) in shared), None)


@torch.inference_mode()
def min_rows(model: nn.Module) -> int | None:
    """The fewest rows that every matmul of this model must see, so that a row's bits do not depend on their number.

    Runs each distinct shape of the model's own layers at many batch sizes. None: no size up to 64 will do, or the model
    has weights (stacked experts) whose rows this cannot control; then it is not exact.
    """
    if any(parameter.ndim > 2 for parameter in model.parameters()):
        return None
    distinct = {
        (type(layer), layer.weight.dtype, layer.bias is None, *_sizes(layer)): layer
        for layer in model.modules()
        if isinstance(layer, PackedLinear | nn.Linear | Conv1D)
    }
    needed = [fewest_rows(layer, _sizes(layer)[0], layer.weight.dtype) for layer in distinct.values()]
    known = [rows for rows in needed if rows is not None]
    return max(known, default=FEWEST_ROWS) if len(known) == len(needed) else None


def _sizes(layer: PackedLinear | nn.Linear | Conv1D) -> tuple[int, int]:
    return (layer.nx, layer.nf) if isinstance(layer, Conv1D) else (layer.in_features, layer.out_features)


def fewest_rows(run: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype) -> int | None:
    """The fewest rows from which on `run` gives each row the bits that it has in a large batch; None: none up to 64."""
    rows = torch.randn(_REFERENCE_ROWS, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = run(rows)

    def keeps_bits(num: int) -> bool:
        firsts = [(7 * num + 5 * place) % (_REFERENCE_ROWS - num) for place in range(-(-_PROBED_PLACES // num))]
        return all(torch.equal(run(rows[first : first + num]), expected[first : first + num]) for first in firsts)

    stable = list(takewhile(keeps_bits, reversed(_PROBED_ROWS)))
    return stable[-1] if stable else None
