"""Finds the parts of a decoder layer that the kernel computes as one call, all of them fused or
packed before. Knows no model by name, only what models call their parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from services.stage.model.split_layers import GatheredLinear
from services.stage.products.fused import FusedMlp, FusedRmsNorm
from services.stage.products.packing import merged_layer
from services.stage.products.tiled_linear import TiledLinear
from services.stage.products.trial import child_names
from services.stage.ranks.group import RankGroup

_NORMS = (
    {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"},
    {"before_attention": "operator_norm", "before_mlp": "ffn_norm"},
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
_HEAD_NORMS: tuple[dict[str, str], ...] = (
    {},
    {"query_norm": "q_norm", "key_norm": "k_norm"},
    {"query_norm": "q_layernorm", "key_norm": "k_layernorm"},
    {"query_norm": "query_layernorm", "key_norm": "key_layernorm"},
)
"""What they call those of queries and keys."""
_QKV = ("q_proj", "k_proj", "v_proj")
_OUT = ("o_proj", "out_proj")
_PROJECTIONS = {*_QKV, "qkv_proj", *_OUT}

Norms = dict[str, FusedRmsNorm]
"""By their places in a LayerCall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """A layer of norms, one part that mixes tokens, and a gated MLP, with its residuals."""

    norms: Norms
    mixer: nn.Module
    """Attention, or what stands in its place."""
    mlp: FusedMlp
    gate_up: TiledLinear
    down: Any
    """A TiledLinear; with ranks a GatheredLinear."""
    residual_scale: float
    """What the outputs of mixer and MLP are multiplied by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParts:
    """Attention of norms and products only."""

    norms: Norms
    qkv: TiledLinear
    o: Any
    """A TiledLinear; with ranks a GatheredLinear."""


def layer_parts(layer: nn.Module, group: RankGroup | None) -> LayerParts | None:
    """Returns the parts of a layer; None if it has others, or others compute them."""
    parts = {n: part for n, part in layer.named_children() if not isinstance(part, nn.Dropout)}
    mlps = {name: part for name, part in parts.items() if isinstance(part, FusedMlp)}
    names = next((each for each in _NORMS if len(_rest(parts, each, mlps)) == 1), None)
    norms = None if names is None else _fused_norms(layer, names)
    if names is None or norms is None or len(mlps) != 1:
        return None
    (mlp,) = mlps.values()
    (mixer,) = _rest(parts, names, mlps)
    gate_up = mlp.product("gate_up") or merged_layer(mlp.product("gate"), mlp.product("up"))
    down = mlp.product("down")
    if not isinstance(gate_up, TiledLinear) or of_rank(down, group) is None:
        return None
    return LayerParts(
        norms=norms,
        mixer=parts[mixer],
        mlp=mlp,
        gate_up=gate_up,
        down=down,
        residual_scale=getattr(layer, "residual_multiplier", 1.0),
    )


def attention_parts(heads: nn.Module) -> AttentionParts | None:
    """Returns the parts of attention; None if it has others, or others compute them."""
    others = child_names(heads) - _PROJECTIONS
    names = next((each for each in _HEAD_NORMS if others == set(each.values())), None)
    norms = None if names is None else _fused_norms(heads, names)
    if norms is None:
        return None
    children = dict(heads.named_children())
    qkv = children.get("qkv_proj") or merged_layer(*(children.get(name) for name in _QKV))
    out = next((children[name] for name in _OUT if name in children), None)
    return AttentionParts(norms=norms, qkv=qkv, o=out) if isinstance(qkv, TiledLinear) else None


def of_rank(product: Any, group: RankGroup | None) -> TiledLinear | None:
    """Returns what computes a product, or this rank's part of it: ranks put its inputs and outputs
    together."""
    if group is not None:
        is_shared = isinstance(product, GatheredLinear) and product.inputs is not None
        product = product.linear if is_shared else None
    return product if isinstance(product, TiledLinear) else None


def _rest(
    parts: Mapping[str, nn.Module], norms: Mapping[str, str], mlps: Mapping[str, FusedMlp]
) -> set[str]:
    """Returns the names of a layer's parts that are none of these; none if it lacks a norm."""
    return (
        parts.keys() - norms.values() - mlps.keys()
        if parts.keys() >= set(norms.values())
        else set()
    )


def _fused_norms(module: nn.Module, names: Mapping[str, str]) -> Norms | None:
    norms = {place: getattr(module, name) for place, name in names.items()}
    return norms if all(isinstance(norm, FusedRmsNorm) for norm in norms.values()) else None
