"""An encoder's layers as one call of the kernel: attention, MLP, and a LayerNorm behind each, as in
BERT. Recognized by their parts, all of them fused or packed before. Knows no model by name.

Letters of shapes: T packed rows, H the hidden size.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from ctypes import byref, pointer
from typing import Any

import torch
from torch import Tensor, nn

from services.stage.attention.attention import Attention, KvWritten
from services.stage.kernels.kernel import EncoderLayerCall, Kernel
from services.stage.products.fused_gelu import FusedGelu
from services.stage.products.fused_layer_norm import FusedLayerNorm
from services.stage.products.packing import merged_layer
from services.stage.products.tiled_linear import TiledLinear
from services.stage.products.trial import child_names

_PARTS: Mapping[str, Collection[str]] = {
    "": {"attention", "intermediate", "output"},
    "attention": {"self", "output"},
    "attention.self": {"query", "key", "value", "dropout"},
    "attention.output": {"dense", "LayerNorm", "dropout"},
    "intermediate": {"dense", "intermediate_act_fn"},
    "output": {"dense", "LayerNorm", "dropout"},
}


class FusedEncoderLayer:
    """A recognized layer's forward."""

    def __init__(self, kernel: Kernel, attention: Attention, call: EncoderLayerCall) -> None:
        """Takes the call of a layer, which owns the memory that it points to."""
        self._kernel = kernel
        self._attention = attention
        self._call = call

    def takes(self, x: object, _options: Mapping[str, Any]) -> bool:
        """Whether these are hidden states as `forward` needs them."""
        return isinstance(x, Tensor) and x.dim() == 3 and x.shape[0] == 1

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Returns the layer's output [1, T, H] for hidden states [1, T, H], in their dtype.

        Raises ProtocolError for rows that point outside the KV, and KvWritten while attention only
        writes: decoders have such layers too.
        """
        x = hidden_states.contiguous()
        out = None if self._attention.only_writes else torch.empty_like(x)
        call = self._call
        call.x = x.data_ptr()
        call.out = None if out is None else out.data_ptr()
        if (status := self._kernel.run_encoder_layer(byref(call))) != 0:
            raise self._attention.refusal(status)
        if out is None:
            raise KvWritten
        return out


def fused_encoder_layer(
    layer: nn.Module, kernel: Kernel, attention: Attention
) -> FusedEncoderLayer | None:
    """Returns the layer as one call, if it has the parts, and no others, that the kernel puts
    together. Its attention has run."""
    if not all(child_names(layer.get_submodule(name)) == _PARTS[name] for name in _PARTS):
        return None
    heads: Any = layer.get_submodule("attention.self")
    behind: Any = layer.get_submodule("attention.output")
    mlp: Any = layer.get_submodule("intermediate")
    output: Any = layer.get_submodule("output")
    asked = attention.call(heads.layer_idx)
    products: list[Any] = [
        merged_layer(heads.query, heads.key, heads.value),
        *(behind.dense, mlp.dense, output.dense),
    ]
    norms: list[Any] = [behind.LayerNorm, output.LayerNorm]
    activation = mlp.intermediate_act_fn
    if (
        asked is None
        or (asked.num_kv_heads, asked.value_dim) != (asked.num_heads, asked.dim)
        or not all(isinstance(product, TiledLinear) for product in products)
        or not all(isinstance(norm, FusedLayerNorm) for norm in norms)
        or not isinstance(activation, FusedGelu)
    ):
        return None
    call = EncoderLayerCall(
        *(None, None),
        *(pointer(product.call) for product in products),
        pointer(asked),
        *(norm.norm for norm in norms),
        activation.uses_tanh,
    )
    return FusedEncoderLayer(kernel, attention, call)
