"""What transformers names the tensors of a GGUF file, and how each is turned back into the weight
that the converter of llama.cpp took. Knows no file.

Letters of shapes: O outputs, I inputs of a linear layer, E experts, H the hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

LAYER = re.compile(r"blk\.(\d+)\.(.+)")
ROPES = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Part of the config."""


Undo = Callable[[Tensor, Any], Tensor]
"""Turns a tensor back into the weight of a model with this config."""


class Part(NamedTuple):
    """Which of the tensors that one weight is made of."""

    number: int
    count: int
    join: Callable[[Sequence[Tensor], Any], Tensor]
    """Makes the weight of all, in order, and the config."""


class Target(NamedTuple):
    """A weight of the model, by its name behind that of its layer."""

    name: str
    undo: Undo | None = None
    each_expert: bool = False
    """Whether the tensor [E, O, I] holds a weight for each expert; its number stands for `{}`."""
    part: Part | None = None


def permuted_queries(weight: Tensor, config: Any) -> Tensor:
    """Undoes the order of rotated dimensions, by pairs, that llama.cpp computes with: [O, I] or
    [O], of any dtype."""
    return _by_halves(weight, config.num_attention_heads)


def permuted_keys(weight: Tensor, config: Any) -> Tensor:
    """Undoes the order of rotated dimensions of keys: [O, I] or [O], of any dtype."""
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return _by_halves(weight, kv_heads)


def shifted(weight: Tensor, _: Any) -> Tensor:
    """Undoes that a norm's weight, float32 [D], is stored with the 1 that the model adds."""
    return weight - 1


def with_channels(weight: Tensor, _: Any) -> Tensor:
    """Undoes that a convolution of each channel alone, [H, 1, L] of any dtype, is stored as [H,
    L]."""
    return weight[:, None]


def transposed(parts: Sequence[Tensor], _: Any) -> Tensor:
    """Returns experts [E, I, O] of one tensor [E, O, I] of any dtype."""
    (weight,) = parts
    return weight.mT


def interleaved(parts: Sequence[Tensor], _: Any) -> Tensor:
    """Returns experts [E, I, 2 O], or biases [E, 2 O], whose outputs are in turn of the first and
    the second tensor, [E, O, I] or [E, O] of any dtype."""
    pairs = torch.stack(list(parts), 2).flatten(1, 2)
    return pairs if pairs.dim() == 2 else pairs.mT


def _by_halves(weight: Tensor, num_heads: int) -> Tensor:
    half = weight.shape[0] // num_heads // 2
    pairs = weight.view(num_heads, half, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _both(
    gguf: str, name: str, undo: Undo | None = None, bias: Undo | None = None
) -> dict[str, Target]:
    """The weight and the bias of one module."""
    return {
        f"{gguf}.weight": Target(f"{name}.weight", undo),
        f"{gguf}.bias": Target(f"{name}.bias", bias),
    }


ENDS = {
    "token_embd.weight": Target("model.embed_tokens.weight"),
    **_both("output_norm", "model.norm"),
    "output.weight": Target("lm_head.weight"),
}
SHIFTED_ENDS = ENDS | _both("output_norm", "model.norm", shifted)

VALUES = _both("attn_v", "self_attn.v_proj") | _both("attn_output", "self_attn.o_proj")
ATTENTION = _both("attn_q", "self_attn.q_proj") | _both("attn_k", "self_attn.k_proj") | VALUES
PERMUTED_ATTENTION = (
    _both("attn_q", "self_attn.q_proj", permuted_queries, permuted_queries)
    | _both("attn_k", "self_attn.k_proj", permuted_keys, permuted_keys)
    | VALUES
)
UP_AND_DOWN = _both("ffn_up", "mlp.up_proj") | _both("ffn_down", "mlp.down_proj")
GATED = _both("ffn_gate", "mlp.gate_proj") | UP_AND_DOWN
NORMS = _both("attn_norm", "input_layernorm") | _both("ffn_norm", "post_attention_layernorm")
SHIFTED_NORMS = _both("attn_norm", "input_layernorm", shifted) | _both(
    "ffn_norm", "post_attention_layernorm", shifted
)
HEAD_NORMS = _both("attn_q_norm", "self_attn.q_norm") | _both("attn_k_norm", "self_attn.k_norm")
SHIFTED_HEAD_NORMS = _both("attn_q_norm", "self_attn.q_norm", shifted) | _both(
    "attn_k_norm", "self_attn.k_norm", shifted
)
FOUR_NORMS = (
    _both("attn_norm", "input_layernorm", shifted)
    | _both("post_attention_norm", "post_attention_layernorm", shifted)
    | _both("ffn_norm", "pre_feedforward_layernorm", shifted)
    | _both("post_ffw_norm", "post_feedforward_layernorm", shifted)
)
EXPERTS = _both("ffn_gate_inp", "mlp.gate") | {
    f"ffn_{part}_exps.weight": Target(f"mlp.experts.{{}}.{part}_proj.weight", each_expert=True)
    for part in ("gate", "up", "down")
}

GPT_OSS_EXPERTS = {
    **_both("ffn_gate_inp", "mlp.router"),
    **{
        f"ffn_{part}_exps.{kind}": Target(
            f"mlp.experts.gate_up_proj{end}", part=Part(number, 2, interleaved)
        )
        for number, part in enumerate(("gate", "up"))
        for kind, end in (("weight", ""), ("bias", "_bias"))
    },
    "ffn_down_exps.weight": Target("mlp.experts.down_proj", part=Part(0, 1, transposed)),
    "ffn_down_exps.bias": Target("mlp.experts.down_proj_bias"),
}

POST_NORMS = _both("post_attention_norm", "post_attention_layernorm") | _both(
    "post_ffw_norm", "post_feedforward_layernorm"
)
LLAMA = ENDS, PERMUTED_ATTENTION | GATED | NORMS
QWEN3 = ATTENTION | HEAD_NORMS | NORMS
TARGETS: dict[str, tuple[Mapping[str, Target], Mapping[str, Target]]] = {
    "llama": LLAMA,
    "granite": LLAMA,
    "qwen2": (ENDS, ATTENTION | GATED | NORMS),
    "qwen3": (ENDS, QWEN3 | GATED),
    "qwen3moe": (ENDS, QWEN3 | EXPERTS),
    "gemma2": (SHIFTED_ENDS, ATTENTION | GATED | FOUR_NORMS),
    "gemma3": (SHIFTED_ENDS, ATTENTION | GATED | FOUR_NORMS | SHIFTED_HEAD_NORMS),
    "phi3": (
        ENDS,
        _both("attn_qkv", "self_attn.qkv_proj")
        | VALUES
        | _both("ffn_up", "mlp.gate_up_proj")
        | _both("ffn_down", "mlp.down_proj")
        | NORMS,
    ),
    "starcoder2": (
        ENDS,
        ATTENTION | _both("ffn_up", "mlp.c_fc") | _both("ffn_down", "mlp.c_proj") | NORMS,
    ),
    "gemma": (SHIFTED_ENDS, ATTENTION | GATED | SHIFTED_NORMS),
    "smollm3": LLAMA,
    "mistral3": LLAMA,
    "olmo2": (ENDS, ATTENTION | HEAD_NORMS | GATED | POST_NORMS),
    "exaone4": (ENDS, ATTENTION | HEAD_NORMS | GATED | POST_NORMS),
    "glm4": (
        ENDS,
        ATTENTION
        | _both("ffn_up", "mlp.gate_up_proj")
        | _both("ffn_down", "mlp.down_proj")
        | NORMS
        | _both("post_attention_norm", "post_self_attn_layernorm")
        | _both("post_ffw_norm", "post_mlp_layernorm"),
    ),
    "seed_oss": (
        ENDS,
        ATTENTION
        | GATED
        | _both("attn_norm", "input_layernorm")
        | _both("post_attention_norm", "post_attention_layernorm"),
    ),
    "gpt-oss": (
        ENDS,
        ATTENTION
        | GPT_OSS_EXPERTS
        | _both("attn_norm", "input_layernorm")
        | _both("post_attention_norm", "post_attention_layernorm")
        | {"attn_sinks.weight": Target("self_attn.sinks")},
    ),
    "lfm2": (
        ENDS
        | _both("token_embd_norm", "model.embedding_norm")
        | _both("output_norm", "model.embedding_norm"),
        _both("attn_q", "self_attn.q_proj")
        | _both("attn_k", "self_attn.k_proj")
        | _both("attn_v", "self_attn.v_proj")
        | _both("attn_output", "self_attn.out_proj")
        | _both("attn_q_norm", "self_attn.q_layernorm")
        | _both("attn_k_norm", "self_attn.k_layernorm")
        | _both("shortconv.conv", "conv.conv", with_channels)
        | _both("shortconv.in_proj", "conv.in_proj")
        | _both("shortconv.out_proj", "conv.out_proj")
        | _both("ffn_gate", "feed_forward.w1")
        | _both("ffn_up", "feed_forward.w3")
        | _both("ffn_down", "feed_forward.w2")
        | _both("attn_norm", "operator_norm")
        | _both("ffn_norm", "ffn_norm"),
    ),
    "ernie4_5": (ENDS, ATTENTION | GATED | NORMS),
    "nemotron": (SHIFTED_ENDS, ATTENTION | UP_AND_DOWN | SHIFTED_NORMS),
}
"""By architecture: the targets of tensors outside layers, and of those behind `blk.N.`."""


def target_of(architecture: str, name: str) -> tuple[Target, int | None] | None:
    """Returns what a tensor is, and its layer's number if it has one; None for a tensor that the
    architecture does not have."""
    ends, layers = TARGETS[architecture]
    layer = LAYER.fullmatch(name)
    if layer is None:
        found = ends.get(name)
        return None if found is None else (found, None)
    target = layers.get(layer[2])
    if target is None:
        return None
    number = int(layer[1])
    return target._replace(name=f"model.layers.{number}.{target.name}"), number
