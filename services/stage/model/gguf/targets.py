"""How tensors of a GGUF file are turned back into the weights that the converter of llama.cpp took,
and those that architectures have in common. Knows no file.

Letters of shapes: O outputs, I inputs of a linear layer, E experts, H the hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Undo = Callable[[Tensor, Any], Tensor]
"""Turns a tensor back into the weight of a model with this config."""


class Part(NamedTuple):
    """Which of the tensors that one weight is made of."""

    number: int
    num_parts: int
    join: Callable[[Sequence[Tensor], Any], Tensor]
    """Makes the weight of all, in order, and the config."""


class Target(NamedTuple):
    """A weight of the model, by its name behind that of its layer."""

    name: str
    undo: Undo | None = None
    each_expert: bool = False
    """Whether the tensor [E, O, I] holds a weight for each expert; its number stands for `{}`."""
    part: Part | None = None
    is_single: bool = False
    """Whether it stays in float32, as the model keeps it in any dtype."""
    moves_inputs: bool = False
    """Whether undoing moves inputs [.., I], not rows."""


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


def logarithms(weight: Tensor, _: Any) -> Tensor:
    """Undoes that decays are stored as negative numbers, float32 [...]."""
    return (-weight).log()


def in_a_row(weight: Tensor, _: Any) -> Tensor:
    """Returns a layer's one output, [1, I], stored as [I] or [1, I] of any dtype."""
    return weight.reshape(1, -1)


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


def behind(parts: Sequence[Tensor], _: Any) -> Tensor:
    """Returns outputs of several tensors, [O, I] or [E, O, I] of any dtype, one's behind
    another's."""
    return torch.cat(list(parts), -2)


def _by_halves(weight: Tensor, num_heads: int) -> Tensor:
    half = weight.shape[0] // num_heads // 2
    pairs = weight.view(num_heads, half, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def both(
    gguf: str, name: str, undo: Undo | None = None, bias: Undo | None = None
) -> dict[str, Target]:
    """Returns the weight and the bias of one module."""
    return {
        f"{gguf}.weight": Target(f"{name}.weight", undo),
        f"{gguf}.bias": Target(f"{name}.bias", bias),
    }


ENDS = {
    "token_embd.weight": Target("model.embed_tokens.weight"),
    **both("output_norm", "model.norm"),
    "output.weight": Target("lm_head.weight"),
}
SHIFTED_ENDS = ENDS | both("output_norm", "model.norm", shifted)

VALUES = both("attn_v", "self_attn.v_proj") | both("attn_output", "self_attn.o_proj")
ATTENTION = both("attn_q", "self_attn.q_proj") | both("attn_k", "self_attn.k_proj") | VALUES
PERMUTED_ATTENTION = (
    both("attn_q", "self_attn.q_proj", permuted_queries, permuted_queries)
    | both("attn_k", "self_attn.k_proj", permuted_keys, permuted_keys)
    | VALUES
)
UP_AND_DOWN = both("ffn_up", "mlp.up_proj") | both("ffn_down", "mlp.down_proj")
GATED = both("ffn_gate", "mlp.gate_proj") | UP_AND_DOWN
NORMS = both("attn_norm", "input_layernorm") | both("ffn_norm", "post_attention_layernorm")
SHIFTED_NORMS = both("attn_norm", "input_layernorm", shifted) | both(
    "ffn_norm", "post_attention_layernorm", shifted
)
HEAD_NORMS = both("attn_q_norm", "self_attn.q_norm") | both("attn_k_norm", "self_attn.k_norm")
SHIFTED_HEAD_NORMS = both("attn_q_norm", "self_attn.q_norm", shifted) | both(
    "attn_k_norm", "self_attn.k_norm", shifted
)
FOUR_NORMS = (
    both("attn_norm", "input_layernorm", shifted)
    | both("post_attention_norm", "post_attention_layernorm", shifted)
    | both("ffn_norm", "pre_feedforward_layernorm", shifted)
    | both("post_ffw_norm", "post_feedforward_layernorm", shifted)
)
EXPERTS = both("ffn_gate_inp", "mlp.gate") | {
    f"ffn_{part}_exps.weight": Target(f"mlp.experts.{{}}.{part}_proj.weight", each_expert=True)
    for part in ("gate", "up", "down")
}

SHARED_EXPERTS = (
    EXPERTS
    | both("ffn_gate_shexp", "mlp.shared_expert.gate_proj")
    | both("ffn_up_shexp", "mlp.shared_expert.up_proj")
    | both("ffn_down_shexp", "mlp.shared_expert.down_proj")
    | both("ffn_gate_inp_shexp", "mlp.shared_expert_gate", in_a_row)
)
ROUTED_EXPERTS = (
    EXPERTS
    | both("ffn_gate_shexp", "mlp.shared_experts.gate_proj")
    | both("ffn_up_shexp", "mlp.shared_experts.up_proj")
    | both("ffn_down_shexp", "mlp.shared_experts.down_proj")
)
GLM4_EXPERTS = ROUTED_EXPERTS | {
    "exp_probs_b.bias": Target("mlp.gate.e_score_correction_bias", is_single=True)
}
ERNIE_EXPERTS = ROUTED_EXPERTS | {
    "exp_probs_b.bias": Target("mlp.moe_statics.e_score_correction_bias", in_a_row, is_single=True)
}
MIXTRAL_EXPERTS = both("ffn_gate_inp", "block_sparse_moe.gate") | {
    f"ffn_{part}_exps.weight": Target(
        f"block_sparse_moe.experts.{{}}.{name}.weight", each_expert=True
    )
    for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}
GEMMA4_ENDS = (
    ENDS
    | both("per_layer_token_embd", "model.embed_tokens_per_layer")
    | both("per_layer_model_proj", "model.per_layer_model_projection")
    | both("per_layer_proj_norm", "model.per_layer_projection_norm")
)
PER_LAYER_INPUTS = (
    ATTENTION
    | HEAD_NORMS
    | GATED
    | both("attn_norm", "input_layernorm")
    | both("post_attention_norm", "post_attention_layernorm")
    | both("ffn_norm", "pre_feedforward_layernorm")
    | both("post_ffw_norm", "post_feedforward_layernorm")
    | both("inp_gate", "per_layer_input_gate")
    | both("proj", "per_layer_projection")
    | both("post_norm", "post_per_layer_input_norm")
)
GEMMA4 = (
    PER_LAYER_INPUTS
    | both("pre_ffw_norm_2", "pre_feedforward_layernorm_2")
    | both("post_ffw_norm_1", "post_feedforward_layernorm_1")
    | both("post_ffw_norm_2", "post_feedforward_layernorm_2")
    | both("ffn_gate_inp", "router.proj")
    | {
        "ffn_gate_inp.scale": Target("router.scale"),
        "ffn_down_exps.scale": Target("router.per_expert_scale"),
        "ffn_gate_up_exps.weight": Target("experts.gate_up_proj"),
        "ffn_down_exps.weight": Target("experts.down_proj"),
        "layer_output_scale.weight": Target("layer_scalar"),
    }
)
GEMMA3N_ENDS = GEMMA4_ENDS | {
    f"{gguf}.weight": Target(f"model.{name}.{{}}.weight", each_expert=True)
    for gguf, name in (
        ("altup_proj", "altup_projections"),
        ("altup_unembd_proj", "altup_unembed_projections"),
    )
}
GEMMA3N = (
    PER_LAYER_INPUTS
    | both("altup_correct_coef", "altup.correction_coefs")
    | both("altup_predict_coef", "altup.prediction_coefs")
    | both("altup_router", "altup.modality_router")
    | both("altup_router_norm", "altup.router_norm")
    | both("laurel_l", "laurel.linear_left")
    | both("laurel_r", "laurel.linear_right")
    | both("laurel_post_norm", "laurel.post_laurel_norm")
    | {"altup_correct_scale.weight": Target("altup.correct_output_scale")}
)
GPT_OSS_EXPERTS = {
    **both("ffn_gate_inp", "mlp.router"),
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

POST_NORMS = both("post_attention_norm", "post_attention_layernorm") | both(
    "post_ffw_norm", "post_feedforward_layernorm"
)
