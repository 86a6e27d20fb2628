"""Architectures with experts, or with layers of Mamba-2, and Cohere's: what their metadata mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardline_gguf.architecture import (
    ANYTHING,
    EXPERTS,
    GROUPED,
    HEAD,
    KV_HEADS,
    RMS,
    SCALES,
    WINDOW,
    Architecture,
    keys,
)
from shardline_gguf.metadata import Metadata
from shardline_gguf.refusal import refuse

WIDTH = {"expert_feed_forward_length": "moe_intermediate_size"}
LOCAL_EXPERTS = {
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}
LAYER_NORM = {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"}
SIGMOID = 2
"""Of `expert_gating_func`."""
ROUTED = WIDTH | {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
}
NEMOTRON_H = {
    **{key: field for key, field in GROUPED.items() if key != "feed_forward_length"},
    **HEAD,
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "ssm_state_size",
    "ssm.group_count": "n_groups",
    "ssm.time_step_rank": "mamba_num_heads",
}
NEMOTRON_HEADS = {"ssm.inner_size": ("mamba_head_dim", "mamba_num_heads")}
NEMOTRON_KINDS = {"ssm_a": "linear_attention", "attn_k.weight": "full_attention"}
NEMOTRON_CONSTANTS = {
    "attention.layer_norm_epsilon": ANYTHING,
    "rope.scaling.finetuned": False,
}


def _granite_hybrid(
    metadata: Metadata, config: Mapping[str, Any], _: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns how wide layers of Mamba-2 are, and whether attention rotates at all."""
    width = metadata.get("ssm.inner_size")
    is_rotated = metadata.get("rope.scaling.finetuned")
    return {
        "mamba_expand": width // config["hidden_size"],
        "position_embedding_type": "rope" if is_rotated else None,
    }


def _falcon_h1(
    metadata: Metadata, _: Mapping[str, Any], tensors: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns whether a norm stands behind Mamba-2's gate. Raises Invalid for a file without an
    output layer: factors are part of the embedding's weights."""
    if "output.weight" not in tensors:
        refuse(f"{metadata.path} has no output.weight", "Give the model in safetensors")
    return {"mamba_rms_norm": "blk.0.ssm_norm.weight" in tensors}


def _without_rope(
    _metadata: Metadata, _config: Mapping[str, Any], _tensors: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns that nothing is rotated."""
    return {"rope_parameters": None}


LATER = {
    "falcon-h1": Architecture(
        model_type="falcon_h1",
        model_class="FalconH1ForCausalLM",
        sizes=GROUPED
        | RMS
        | HEAD
        | {
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
            "ssm.group_count": "mamba_n_groups",
            "ssm.time_step_rank": "mamba_n_heads",
            "ssm.inner_size": "mamba_d_ssm",
        },
        # Factors of activations are part of the weights here.
        fixed={"mamba_norm_before_gate": False},
        shares={"ssm.inner_size": ("mamba_d_head", "mamba_n_heads")},
        fields=_falcon_h1,
        constants={},
    ),
    "nemotron_h": Architecture(
        model_type="nemotron_h",
        model_class="NemotronHForCausalLM",
        sizes=NEMOTRON_H | {"feed_forward_length": "intermediate_size"},
        kinds={**NEMOTRON_KINDS, "ffn_up.weight": "mlp"},
        shares=NEMOTRON_HEADS,
        fields=_without_rope,
        constants=NEMOTRON_CONSTANTS,
    ),
    "nemotron_h_moe": Architecture(
        model_type="nemotron_h",
        model_class="NemotronHForCausalLM",
        sizes=NEMOTRON_H
        | ROUTED
        | {"expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size"},
        optional=keys("expert_group_used_count"),
        kinds={**NEMOTRON_KINDS, "ffn_gate_inp.weight": "moe"},
        shares=NEMOTRON_HEADS,
        fields=_without_rope,
        constants=NEMOTRON_CONSTANTS
        | {"feed_forward_length": ANYTHING, "expert_gating_func": SIGMOID},
    ),
    "granitehybrid": Architecture(
        model_type="granitemoehybrid",
        model_class="GraniteMoeHybridForCausalLM",
        sizes=GROUPED
        | RMS
        | SCALES
        | LOCAL_EXPERTS
        | {
            "expert_shared_feed_forward_length": "shared_intermediate_size",
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
            "ssm.group_count": "mamba_n_groups",
            "ssm.time_step_rank": "mamba_n_heads",
        },
        optional=keys(*LOCAL_EXPERTS),
        fixed={"num_local_experts": 0},
        kinds={"ssm_a": "mamba", "attn_k.weight": "attention"},
        shares={"ssm.inner_size": ("mamba_d_head", "mamba_n_heads")},
        fields=_granite_hybrid,
        constants={},
    ),
    "glm4moe": Architecture(
        model_type="glm4_moe",
        model_class="Glm4MoeForCausalLM",
        sizes=GROUPED
        | RMS
        | HEAD
        | ROUTED
        | {"leading_dense_block_count": "first_k_dense_replace"},
        optional=keys("expert_group_count", "expert_group_used_count"),
        biases={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
        is_partial=True,
        constants={"expert_gating_func": SIGMOID},
    ),
    "ernie4_5-moe": Architecture(
        model_type="ernie4_5_moe",
        model_class="Ernie4_5_MoeForCausalLM",
        sizes=GROUPED
        | RMS
        | HEAD
        | WIDTH
        | {
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_shared_count": "moe_num_shared_experts",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        optional=keys(*HEAD),
        biases={"use_bias": "attn_q.bias"},
        # The converter divides by another number here: tensors have the right size.
        constants={"expert_shared_feed_forward_length": ANYTHING},
    ),
    "olmoe": Architecture(
        model_type="olmoe",
        model_class="OlmoeForCausalLM",
        sizes=GROUPED
        | RMS
        | {key: field for key, field in EXPERTS.items() if key not in WIDTH}
        | {"expert_feed_forward_length": "intermediate_size"},
        optional=keys(KV_HEADS, *WIDTH),
        fixed={"norm_topk_prob": False},
        constants={},
    ),
    "command-r": Architecture(
        model_type="cohere",
        model_class="CohereForCausalLM",
        sizes=GROUPED | LAYER_NORM,
        biases={"use_qk_norm": "attn_q_norm.weight"},
        constants={},
    ),
    "cohere2": Architecture(
        model_type="cohere2",
        model_class="Cohere2ForCausalLM",
        sizes=GROUPED | LAYER_NORM | HEAD | WINDOW,
        optional=keys(*HEAD),
        constants={},
    ),
    "hunyuan-dense": Architecture(
        model_type="hunyuan_v1_dense",
        model_class="HunYuanDenseV1ForCausalLM",
        sizes=GROUPED | RMS | HEAD,
        optional=keys(*HEAD),
        constants={},
    ),
}
"""By their names in llama.cpp."""

MIXTRAL = Architecture(
    model_type="mixtral",
    model_class="MixtralForCausalLM",
    sizes=GROUPED | RMS | HEAD | LOCAL_EXPERTS,
    optional=keys(KV_HEADS, *HEAD),
    fixed={"sliding_window": None},
    constants={},
)
"""Named `llama`, as models without experts are."""
