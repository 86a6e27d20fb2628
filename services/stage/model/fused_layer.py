"""Layers as one call of the kernel, where that gives every bit of the layer's own forward in a
trial.

A layer is recognized by its parts, all of them fused or packed before. A trial then decides: it
sees what parts do not show, such as a scaled residual. Knows no model by name.

Letters of shapes: T packed rows, H the hidden size, D the size of an attention head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from ctypes import byref, pointer
from typing import Any

import torch
from torch import Tensor, nn

from services.stage.attention.attention import Attention, KvWritten
from services.stage.kernels.kernel import Kernel, LayerCall, Norm
from services.stage.model.fused_encoder_layer import FusedEncoderLayer, fused_encoder_layer
from services.stage.model.split_layers import GatheredLinear
from services.stage.products.fused import FusedMlp, FusedRmsNorm
from services.stage.products.packing import merged_layer
from services.stage.products.tiled_linear import TiledLinear
from services.stage.products.trial import child_names
from services.stage.ranks.group import RankGroup


class FusedLayer:
    """A recognized layer's forward."""

    def __init__(self, kernel: Kernel, attention: Attention, call: LayerCall) -> None:
        """Takes the call of a layer, which owns the memory that it points to."""
        self._kernel = kernel
        self._attention = attention
        self._call = call

    def takes(self, x: object, options: Mapping[str, Any]) -> bool:
        """Whether these are hidden states and tables of cos and sin as `forward` needs them."""
        tables = options.get("position_embeddings")
        if (
            not isinstance(x, Tensor)
            or not isinstance(tables, tuple)
            or x.dim() != 3
            or x.shape[0] != 1
        ):
            return False
        shape = (1, x.shape[1], self._call.attention.contents.dim)
        return all(table.shape == shape and table.dtype == x.dtype for table in tables)

    def forward(
        self, hidden_states: Tensor, *_: Any, position_embeddings: tuple[Tensor, Tensor], **__: Any
    ) -> Tensor:
        """Returns the layer's output [1, T, H] for hidden states [1, T, H] and cos and sin [1, T,
        D], in one dtype.

        Raises ProtocolError for rows that point outside the KV, and KvWritten while attention only
        writes.
        """
        x, (cos, sin) = (
            hidden_states.contiguous(),
            (table.contiguous() for table in position_embeddings),
        )
        out = None if self._attention.only_writes else torch.empty_like(x)
        call = self._call
        call.x = x.data_ptr()
        call.cos = cos.data_ptr()
        call.sin = sin.data_ptr()
        call.out = None if out is None else out.data_ptr()
        if (status := self._kernel.run_layer(byref(call))) != 0:
            raise self._attention.refusal(status)
        if out is None:
            raise KvWritten
        return out


FusedLayers = dict[nn.Module, FusedLayer | FusedEncoderLayer]


def fuse_layers(
    layers: Iterable[nn.Module],
    kernel: Kernel,
    attention: Attention,
    trial: Callable[[], object],
    group: RankGroup | None = None,
) -> FusedLayers:
    """Replaces the forward of each layer that can be one call; returns those. `trial` runs all of
    them once, at positions over the whole context: what a layer does by its position only there is
    seen too.

    `group` has the ranks that compute the layers together, if several do.
    """
    asked: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any], Any]] = {}

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        asked[layer] = args, kwargs, out

    hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    trial()
    for hook in hooks:
        hook.remove()
    fused: FusedLayers = {}
    for layer, call in asked.items():
        one: FusedLayer | FusedEncoderLayer | None = _fused(layer, kernel, attention, group)
        if one is None and group is None:
            one = fused_encoder_layer(layer, kernel, attention)
        if one is not None and _use_fused(layer, one, *call):
            fused[layer] = one
    return fused


def _use_fused(
    layer: Any,
    fused: FusedLayer | FusedEncoderLayer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    expected: object,
) -> bool:
    """Gives the layer this forward if a call of the layer then returns what it did before."""
    x = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(expected, Tensor) or not fused.takes(x, kwargs):
        return False
    layer.forward = fused.forward
    if torch.equal(layer(*args, **kwargs), expected):
        return True
    del layer.forward
    return False


def _fused(
    layer: Any, kernel: Kernel, attention: Attention, group: RankGroup | None
) -> FusedLayer | None:
    """The layer as one call, if it has the parts, and no others, that the kernel puts together."""
    if child_names(layer) != {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}:
        return None
    heads = layer.self_attn
    mlp = layer.mlp
    no_norm = Norm()
    head_norms = {"q_norm", "k_norm"} & child_names(heads)
    projections = {"q_proj", "k_proj", "v_proj", "o_proj"}
    if child_names(heads) != projections | head_norms or not isinstance(mlp, FusedMlp):
        return None
    asked = attention.call(heads.layer_idx)
    norms = [
        layer.input_layernorm,
        layer.post_attention_layernorm,
        *(getattr(heads, name) for name in head_norms),
    ]
    qkv = merged_layer(heads.q_proj, heads.k_proj, heads.v_proj)
    gate_up = merged_layer(mlp.gate_proj, mlp.up_proj)
    products = [qkv, _mine(heads.o_proj, group), gate_up, _mine(mlp.down_proj, group)]
    if asked is None or asked.sinks or asked.value_dim != asked.dim:
        return None
    if not all(isinstance(norm, FusedRmsNorm) for norm in norms) or not all(
        isinstance(p, TiledLinear) for p in products
    ):
        return None
    if any(len(getattr(heads, name).scale) != asked.dim for name in head_norms):
        return None
    call = LayerCall(
        *(None,) * 4,
        *(pointer(product.call) for product in products),
        pointer(asked),
        layer.input_layernorm.norm,
        *(
            getattr(heads, name).norm if name in head_norms else no_norm
            for name in ("q_norm", "k_norm")
        ),
        layer.post_attention_layernorm.norm,
        *_together([heads.o_proj, mlp.down_proj], group),
    )
    return FusedLayer(kernel, attention, call)


def _mine(product: Any, group: RankGroup | None) -> Any:
    """Returns the product; with ranks this one's part: they put its inputs and outputs together."""
    if group is None:
        return product
    return (
        product.linear
        if isinstance(product, GatheredLinear) and product.inputs is not None
        else None
    )


def _together(products: list[Any], group: RankGroup | None) -> list[Any]:
    """The ranks, and where in a row of inputs and of outputs of each product this one's are."""
    if group is None:
        return []
    return [
        pointer(group.call),
        *(share.mine.start for each in products for share in (each.inputs, each.outputs)),
    ]
