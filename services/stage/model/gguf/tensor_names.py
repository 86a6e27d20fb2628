"""What transformers names the tensors of a GGUF file, by architecture. Knows no file."""

from __future__ import annotations

import re
from collections.abc import Mapping

from services.stage.model.gguf.recurrent_targets import (
    FALCON_H1,
    GRANITE_HYBRID,
    NEMOTRON_EXPERTS,
    NEMOTRON_H,
    QWEN3_NEXT,
    QWEN35,
)
from services.stage.model.gguf.targets import (
    ATTENTION,
    ENDS,
    ERNIE_EXPERTS,
    EXPERTS,
    FOUR_NORMS,
    GATED,
    GEMMA3N,
    GEMMA3N_ENDS,
    GEMMA4,
    GEMMA4_ENDS,
    GLM4_EXPERTS,
    GPT_OSS_EXPERTS,
    HEAD_NORMS,
    MIXTRAL_EXPERTS,
    NORMS,
    PERMUTED_ATTENTION,
    POST_NORMS,
    SHARED_EXPERTS,
    SHIFTED_ENDS,
    SHIFTED_HEAD_NORMS,
    SHIFTED_NORMS,
    UP_AND_DOWN,
    VALUES,
    Target,
    both,
    with_channels,
)

LAYER = re.compile(r"blk\.(\d+)\.(.+)")
ROPES = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Part of the config."""

LLAMA = ENDS, PERMUTED_ATTENTION | GATED | NORMS
QWEN3 = ATTENTION | HEAD_NORMS | NORMS
NEMOTRON_ENDS = ENDS | both("token_embd", "model.embeddings") | both("output_norm", "model.norm_f")
TARGETS: dict[str, tuple[Mapping[str, Target], Mapping[str, Target]]] = {
    "llama": (ENDS, LLAMA[1] | MIXTRAL_EXPERTS),
    "olmoe": (ENDS, QWEN3 | EXPERTS),
    "granitehybrid": (ENDS, GRANITE_HYBRID),
    "falcon-h1": (ENDS | both("output_norm", "model.final_layernorm"), FALCON_H1),
    "nemotron_h": (NEMOTRON_ENDS, NEMOTRON_H),
    "nemotron_h_moe": (NEMOTRON_ENDS, NEMOTRON_H | NEMOTRON_EXPERTS),
    "glm4moe": (
        ENDS,
        ATTENTION
        | HEAD_NORMS
        | GATED
        | GLM4_EXPERTS
        | both("attn_norm", "input_layernorm")
        | both("post_attention_norm", "post_attention_layernorm"),
    ),
    "ernie4_5-moe": (ENDS, ATTENTION | GATED | ERNIE_EXPERTS | NORMS),
    "command-r": (ENDS, QWEN3 | GATED),
    "cohere2": (ENDS, ATTENTION | GATED | NORMS),
    "hunyuan-dense": (
        ENDS,
        ATTENTION
        | GATED
        | NORMS
        | both("attn_q_norm", "self_attn.query_layernorm")
        | both("attn_k_norm", "self_attn.key_layernorm"),
    ),
    "granite": LLAMA,
    "qwen3next": (SHIFTED_ENDS, QWEN3_NEXT),
    "qwen35": (SHIFTED_ENDS, QWEN35 | GATED),
    "qwen35moe": (SHIFTED_ENDS, QWEN35 | SHARED_EXPERTS),
    "qwen2": (ENDS, ATTENTION | GATED | NORMS),
    "qwen3": (ENDS, QWEN3 | GATED),
    "qwen3moe": (ENDS, QWEN3 | EXPERTS),
    "gemma2": (SHIFTED_ENDS, ATTENTION | GATED | FOUR_NORMS),
    "gemma3": (SHIFTED_ENDS, ATTENTION | GATED | FOUR_NORMS | SHIFTED_HEAD_NORMS),
    "gemma3n": (GEMMA3N_ENDS, GEMMA3N),
    "gemma4": (GEMMA4_ENDS, GEMMA4),
    "phi3": (
        ENDS,
        both("attn_qkv", "self_attn.qkv_proj")
        | VALUES
        | both("ffn_up", "mlp.gate_up_proj")
        | both("ffn_down", "mlp.down_proj")
        | NORMS,
    ),
    "starcoder2": (
        ENDS,
        ATTENTION | both("ffn_up", "mlp.c_fc") | both("ffn_down", "mlp.c_proj") | NORMS,
    ),
    "gemma": (SHIFTED_ENDS, ATTENTION | GATED | SHIFTED_NORMS),
    "smollm3": LLAMA,
    "mistral3": LLAMA,
    "olmo2": (ENDS, ATTENTION | HEAD_NORMS | GATED | POST_NORMS),
    "exaone4": (ENDS, ATTENTION | HEAD_NORMS | GATED | POST_NORMS),
    "glm4": (
        ENDS,
        ATTENTION
        | both("ffn_up", "mlp.gate_up_proj")
        | both("ffn_down", "mlp.down_proj")
        | NORMS
        | both("post_attention_norm", "post_self_attn_layernorm")
        | both("post_ffw_norm", "post_mlp_layernorm"),
    ),
    "seed_oss": (
        ENDS,
        ATTENTION
        | GATED
        | both("attn_norm", "input_layernorm")
        | both("post_attention_norm", "post_attention_layernorm"),
    ),
    "gpt-oss": (
        ENDS,
        ATTENTION
        | GPT_OSS_EXPERTS
        | both("attn_norm", "input_layernorm")
        | both("post_attention_norm", "post_attention_layernorm")
        | {"attn_sinks.weight": Target("self_attn.sinks")},
    ),
    "lfm2": (
        ENDS
        | both("token_embd_norm", "model.embedding_norm")
        | both("output_norm", "model.embedding_norm"),
        both("attn_q", "self_attn.q_proj")
        | both("attn_k", "self_attn.k_proj")
        | both("attn_v", "self_attn.v_proj")
        | both("attn_output", "self_attn.out_proj")
        | both("attn_q_norm", "self_attn.q_layernorm")
        | both("attn_k_norm", "self_attn.k_layernorm")
        | both("shortconv.conv", "conv.conv", with_channels)
        | both("shortconv.in_proj", "conv.in_proj")
        | both("shortconv.out_proj", "conv.out_proj")
        | both("ffn_gate", "feed_forward.w1")
        | both("ffn_up", "feed_forward.w3")
        | both("ffn_down", "feed_forward.w2")
        | both("attn_norm", "operator_norm")
        | both("ffn_norm", "ffn_norm"),
    ),
    "ernie4_5": (ENDS, ATTENTION | GATED | NORMS),
    "nemotron": (SHIFTED_ENDS, ATTENTION | UP_AND_DOWN | SHIFTED_NORMS),
}
"""By architecture: the targets of tensors outside layers, and of those behind `blk.N.`."""


def layer_of(name: str) -> int | None:
    """Returns the number of a tensor's layer; None for one of no layer."""
    layer = LAYER.fullmatch(name)
    return None if layer is None else int(layer[1])


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
