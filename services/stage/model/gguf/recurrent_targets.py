"""The tensors of layers that keep a state, such as those of the gated delta rule. Knows no file.

Letters of shapes: K heads of keys, V heads of values, D numbers of a head, H the hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from services.stage.model.gguf.targets import (
    ATTENTION,
    NORMS,
    PERMUTED_ATTENTION,
    SHARED_EXPERTS,
    SHIFTED_HEAD_NORMS,
    Part,
    Target,
    behind,
    both,
    logarithms,
    permuted_keys,
    permuted_queries,
    shifted,
    with_channels,
)


def by_key_heads(parts: Sequence[Tensor], config: Any) -> Tensor:
    """Returns the input layer [.., H] of Qwen3-Next, where queries, keys, values and gates of a
    head of keys stand together: of all queries, keys and values, and of all gates, both [.., H],
    of any dtype."""
    qkv, gates = parts
    heads = config.linear_num_key_heads
    keys = heads * config.linear_key_head_dim
    queries, keys, values = qkv.split([keys, keys, len(qkv) - 2 * keys])
    of_heads = [each.unflatten(0, (heads, -1)) for each in (queries, keys, values, gates)]
    return torch.cat(of_heads, 1).flatten(0, 1)


def grouped(weight: Tensor, config: Any) -> Tensor:
    """Undoes the order of heads of values that llama.cpp computes with: [V D, ..] of any dtype, the
    first of every head of keys before their second."""
    heads = config.linear_num_key_heads
    each = config.linear_num_value_heads // heads
    return weight.unflatten(0, (each, heads, -1)).swapaxes(0, 1).flatten(0, 2)


def grouped_values(weight: Tensor, config: Any) -> Tensor:
    """Undoes the order of heads of values behind queries and keys, [.., ..] of any dtype."""
    others = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return torch.cat((weight[:others], grouped(weight[others:], config)))


def grouped_channels(weight: Tensor, config: Any) -> Tensor:
    """Undoes the order of heads of values in a convolution [.., 1, L] of any dtype, stored as
    [.., L]."""
    return with_channels(grouped_values(weight, config), config)


def grouped_inputs(weight: Tensor, config: Any) -> Tensor:
    """Undoes the order of heads of values in inputs, [.., V D] of any dtype."""
    return grouped(weight.movedim(-1, 0), config).movedim(0, -1)


def grouped_logarithms(weight: Tensor, config: Any) -> Tensor:
    """Undoes the order of heads of values in decays [V], and that they are stored as negative
    numbers, float32."""
    return logarithms(grouped(weight, config), config)


def flat(weight: Tensor, _: Any) -> Tensor:
    """Returns numbers [..] that are stored in rows of heads or groups, of any dtype."""
    return weight.flatten()


def flat_logarithms(weight: Tensor, config: Any) -> Tensor:
    """Undoes that decays [H, 1] are stored as negative numbers in rows, float32."""
    return logarithms(weight.flatten(), config)


GATED_ATTENTION = (
    ATTENTION
    | SHIFTED_HEAD_NORMS
    | both("attn_norm", "input_layernorm", shifted)
    | both("post_attention_norm", "post_attention_layernorm", shifted)
)
QWEN3_NEXT = (
    GATED_ATTENTION
    | SHARED_EXPERTS
    | {
        "attn_qkv.weight": Target("linear_attn.in_proj_qkvz.weight", part=Part(0, 2, by_key_heads)),
        "attn_gate.weight": Target(
            "linear_attn.in_proj_qkvz.weight", part=Part(1, 2, by_key_heads)
        ),
        "ssm_in.weight": Target("linear_attn.in_proj_qkvz.weight"),
        "ssm_ba.weight": Target("linear_attn.in_proj_ba.weight"),
        "ssm_conv1d.weight": Target("linear_attn.conv1d.weight", with_channels),
        "ssm_a": Target("linear_attn.A_log", logarithms),
        "ssm_dt.bias": Target("linear_attn.dt_bias"),
        "ssm_norm.weight": Target("linear_attn.norm.weight"),
        "ssm_out.weight": Target("linear_attn.out_proj.weight"),
    }
)
QWEN35 = GATED_ATTENTION | {
    "attn_qkv.weight": Target("linear_attn.in_proj_qkv.weight", grouped_values),
    "attn_gate.weight": Target("linear_attn.in_proj_z.weight", grouped),
    "ssm_alpha.weight": Target("linear_attn.in_proj_a.weight", grouped),
    "ssm_beta.weight": Target("linear_attn.in_proj_b.weight", grouped),
    "ssm_conv1d.weight": Target("linear_attn.conv1d.weight", grouped_channels),
    "ssm_a": Target("linear_attn.A_log", grouped_logarithms),
    "ssm_dt.bias": Target("linear_attn.dt_bias", grouped),
    "ssm_norm.weight": Target("linear_attn.norm.weight"),
    "ssm_out.weight": Target("linear_attn.out_proj.weight", grouped_inputs, moves_inputs=True),
}


def _mamba2(name: str) -> dict[str, Target]:
    return {
        **both("ssm_in", f"{name}.in_proj"),
        **both("ssm_conv1d", f"{name}.conv1d", with_channels),
        **both("ssm_out", f"{name}.out_proj"),
        "ssm_a": Target(f"{name}.A_log", flat_logarithms),
        "ssm_d": Target(f"{name}.D", flat),
        "ssm_dt.bias": Target(f"{name}.dt_bias"),
        "ssm_norm.weight": Target(f"{name}.norm.weight", flat),
    }


def _joined(ends: tuple[str, str], name: str) -> dict[str, Target]:
    return {
        f"{end}.weight": Target(f"{name}.weight", part=Part(number, 2, behind))
        for number, end in enumerate(ends)
    }


GRANITE_HYBRID = (
    PERMUTED_ATTENTION
    | _mamba2("mamba")
    | NORMS
    | _joined(("ffn_gate", "ffn_up"), "shared_mlp.input_linear")
    | _joined(("ffn_gate_shexp", "ffn_up_shexp"), "shared_mlp.input_linear")
    | both("ffn_down", "shared_mlp.output_linear")
    | both("ffn_down_shexp", "shared_mlp.output_linear")
    | _joined(("ffn_gate_exps", "ffn_up_exps"), "block_sparse_moe.input_linear")
    | both("ffn_down_exps", "block_sparse_moe.output_linear")
    | both("ffn_gate_inp", "block_sparse_moe.router.layer")
)
FALCON_H1 = (
    ATTENTION
    | _mamba2("mamba")
    | both("attn_norm", "input_layernorm")
    | both("ffn_norm", "pre_ff_layernorm")
    # The converter names it without its kind.
    | {"ffn_norm": Target("pre_ff_layernorm.weight")}
    | both("ffn_gate", "feed_forward.gate_proj")
    | both("ffn_up", "feed_forward.up_proj")
    | both("ffn_down", "feed_forward.down_proj")
)
NEMOTRON_H = (
    _mamba2("mixer")
    | both("attn_norm", "norm")
    | both("attn_q", "mixer.q_proj", permuted_queries, permuted_queries)
    | both("attn_k", "mixer.k_proj", permuted_keys, permuted_keys)
    | both("attn_v", "mixer.v_proj")
    | both("attn_output", "mixer.o_proj")
    | both("ffn_up", "mixer.up_proj")
    | both("ffn_down", "mixer.down_proj")
)
NEMOTRON_EXPERTS = {
    **both("ffn_gate_inp", "mixer.gate"),
    **both("ffn_up_shexp", "mixer.shared_experts.up_proj"),
    **both("ffn_down_shexp", "mixer.shared_experts.down_proj"),
    **{
        f"ffn_{part}_exps.weight": Target(
            f"mixer.experts.{{}}.{part}_proj.weight", each_expert=True
        )
        for part in ("up", "down")
    },
    "exp_probs_b.bias": Target("mixer.gate.e_score_correction_bias", is_single=True),
}
