"""Layers as one call of the kernel, where that gives every bit of the layer's own forward in a
trial.

A layer is recognized by its parts, all of them fused or packed before. A trial then decides: it
sees what parts do not show, such as a scaled residual. Knows no model by name.

Letters of shapes: T packed rows, H the hidden size, D the size of an attention head, R its
dimensions that positions turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from ctypes import byref, pointer
from typing import Any

import torch
from torch import Tensor, nn

from services.stage.attention.attention import Attention, KvWritten
from services.stage.kernels.kernel import DTYPES, Kernel, LayerCall, Turned
from services.stage.model.fused_encoder_layer import FusedEncoderLayer, fused_encoder_layer
from services.stage.model.split_layers import GatheredLinear
from services.stage.products.fused import FusedMlp, FusedRmsNorm
from services.stage.products.packing import merged_layer
from services.stage.products.tiled_linear import TiledLinear
from services.stage.products.trial import child_names
from services.stage.ranks.group import RankGroup

_NORMS = (
    {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"},
    {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"},
    {
        "before_attention": "input_layernorm",
        "after_attention": "post_attention_layernorm",
        "before_mlp": "pre_feedforward_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    },
    {
        "before_attention": "input_layernorm",
        "after_attention": "post_self_attn_layernorm",
        "before_mlp": "post_attention_layernorm",
        "after_mlp": "post_mlp_layernorm",
    },
)
"""What models call the norms of whole rows, by their places in a LayerCall."""
_HEAD_NORMS = (
    {"query_norm": "q_norm", "key_norm": "k_norm"},
    {"query_norm": "query_layernorm", "key_norm": "key_layernorm"},
)
"""What they call those of queries and keys."""
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"}


class FusedLayer:
    """A recognized layer's forward."""

    def __init__(self, kernel: Kernel, attention: Attention, call: LayerCall) -> None:
        """Takes the call of a layer, which owns the memory that it points to."""
        self._kernel = kernel
        self._attention = attention
        self._call = call

    def takes(self, x: object, options: Mapping[str, Any]) -> bool:
        """Whether these are hidden states and tables of cos and sin as `forward` needs them."""
        tables = _tables(options)
        turned = self._call.turned
        return (
            tables is not None
            and isinstance(x, Tensor)
            and x.dim() == 3
            and x.shape[0] == 1
            and x.dtype in DTYPES
            and all(table.shape[:2] == x.shape[:2] for table in tables)
            and (
                not turned.dim
                or all(_kind(table) == (turned.dim, turned.dtype) for table in tables)
            )
        )

    def forward(
        self, hidden_states: Tensor, *_: Any, position_embeddings: tuple[Tensor, Tensor], **__: Any
    ) -> Tensor:
        """Returns the layer's output [1, T, H] for hidden states [1, T, H] in one dtype and cos and
        sin [1, T, R] in that or float32.

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
        call.turned.cos = cos.data_ptr()
        call.turned.sin = sin.data_ptr()
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
        candidates: list[FusedLayer | FusedEncoderLayer] = [
            *_candidates(layer, kernel, attention, group, _tables(call[1]))
        ]
        encoder = fused_encoder_layer(layer, kernel, attention) if group is None else None
        if encoder is not None:
            candidates.append(encoder)
        used = (one for one in candidates if _use_fused(layer, one, *call))
        if (one := next(used, None)) is not None:
            fused[layer] = one
    return fused


def _tables(options: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Returns the cos and sin that a layer is called with."""
    tables = options.get("position_embeddings")
    return tables if isinstance(tables, tuple) and len(tables) == 2 else None


def _kind(table: Tensor) -> tuple[int, int]:
    """Returns R and the kernel's number of a table's dtype."""
    return table.shape[-1], DTYPES.get(table.dtype, -1)


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


def _candidates(
    layer: Any,
    kernel: Kernel,
    attention: Attention,
    group: RankGroup | None,
    tables: tuple[Tensor, Tensor] | None,
) -> Iterator[FusedLayer]:
    """Yields what the layer may be as one call, if it has the parts, and no others, that the kernel
    puts together. They do not show where queries and keys are turned, or whether they are."""
    norms = _norms(layer)
    heads = _head_norms(layer.self_attn) if norms else None
    products = _products(layer, group) if norms else None
    asked = attention.call(getattr(layer.self_attn, "layer_idx", -1)) if norms else None
    if heads is None or products is None or asked is None:
        return
    if asked.sinks or asked.value_dim != asked.dim:
        return
    widths = [len(norm.scale) for norm in heads.values()]
    whole = [asked.num_heads * asked.dim, asked.num_kv_heads * asked.dim]
    if widths not in ([], [asked.dim] * 2, whole if group is None else []):
        return
    for norms_turned in (False, True) if heads else (False,):
        for turned in _rotations(tables, asked.dim):
            call = LayerCall(
                turned=turned,
                **{name: pointer(product.call) for name, product in products.items()},
                attention=pointer(asked),
                **{name: norm.norm for name, norm in {**norms, **heads}.items()},
                **_together(layer, group),
                norms_all_heads=widths == whole,
                norms_turned=norms_turned,
                activation=layer.mlp.activation,
                residual_scale=getattr(layer, "residual_multiplier", 1.0),
            )
            yield FusedLayer(kernel, attention, call)


def _rotations(tables: tuple[Tensor, Tensor] | None, head_dim: int) -> list[Turned]:
    """Returns how these tables may turn heads, and how heads stay as they are."""
    size, dtype = _kind(tables[0]) if tables is not None else (0, -1)
    if dtype < 0 or size % 2 or not 0 < size <= head_dim:
        return [Turned()]
    by_table = [Turned(dim=size, dtype=dtype, neighbors=each) for each in (False, True)]
    return [*by_table, Turned()]


def _norms(layer: nn.Module) -> dict[str, FusedRmsNorm]:
    """Returns the norms of whole rows by their places in a LayerCall; none if the layer has other
    parts than these, attention and a gated MLP."""
    parts = {name for name, part in layer.named_children() if not isinstance(part, nn.Dropout)}
    for names in _NORMS:
        if parts == {"self_attn", "mlp", *names.values()}:
            return _fused_norms(layer, names) or {}
    return {}


def _head_norms(heads: nn.Module) -> dict[str, FusedRmsNorm] | None:
    """Returns the norms of queries and keys by their places in a LayerCall, if any; None if
    attention has other parts than these and its products."""
    others = child_names(heads) - _PROJECTIONS
    for names in ({}, *_HEAD_NORMS):
        if others == set(names.values()):
            return _fused_norms(heads, names)
    return None


def _fused_norms(module: nn.Module, names: Mapping[str, str]) -> dict[str, FusedRmsNorm] | None:
    norms = {place: getattr(module, name) for place, name in names.items()}
    return norms if all(isinstance(norm, FusedRmsNorm) for norm in norms.values()) else None


def _products(layer: Any, group: RankGroup | None) -> dict[str, TiledLinear] | None:
    """Returns the products by their places in a LayerCall, if all of them are the kernel's."""
    heads = layer.self_attn
    mlp = layer.mlp
    if not isinstance(mlp, FusedMlp):
        return None
    products = {
        "qkv": _side_by_side(heads, "qkv_proj", ("q_proj", "k_proj", "v_proj")),
        "o": _mine(heads.o_proj, group),
        "gate_up": _side_by_side(mlp, "gate_up_proj", ("gate_proj", "up_proj")),
        "down": _mine(mlp.down_proj, group),
    }
    are_ours = all(isinstance(product, TiledLinear) for product in products.values())
    return products if are_ours else None


def _side_by_side(module: nn.Module, merged: str, apart: tuple[str, ...]) -> nn.Module | None:
    """Returns the product that computes all of these: the model's own, or the one that packing
    made."""
    if merged in child_names(module):
        return module.get_submodule(merged)
    return merged_layer(*(getattr(module, name, None) for name in apart))


def _mine(product: Any, group: RankGroup | None) -> Any:
    """Returns the product; with ranks this one's part: they put its inputs and outputs together."""
    if group is None:
        return product
    return (
        product.linear
        if isinstance(product, GatheredLinear) and product.inputs is not None
        else None
    )


def _together(layer: Any, group: RankGroup | None) -> dict[str, Any]:
    """Returns the ranks, and where in a row of inputs and of outputs of each product this one's
    are."""
    if group is None:
        return {}
    o_proj, down_proj = layer.self_attn.o_proj, layer.mlp.down_proj
    return {
        "ranks": pointer(group.call),
        "first_attended": o_proj.inputs.mine.start,
        "first_o": o_proj.outputs.mine.start,
        "first_inner": down_proj.inputs.mine.start,
        "first_down": down_proj.outputs.mine.start,
    }
