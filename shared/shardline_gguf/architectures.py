"""The architectures of GGUF files that are read, and what their metadata mean in a config of
transformers."""

from __future__ import annotations

from shardline_gguf.architecture import (
    ANYTHING,
    COMMON,
    DELTA_RULE,
    EXPERTS,
    GEMMA,
    GROUPED,
    HEAD,
    KV_HEADS,
    RMS,
    SCALES,
    SHARED_EXPERT,
    VALUE_HEADS,
    WINDOW,
    Architecture,
    keys,
)
from shardline_gguf.gemma3n import gemma3n_fields
from shardline_gguf.gemma4 import gemma4_fields
from shardline_gguf.later_architectures import LATER

LINEAR = {"ssm_a": "linear_attention", "attn_k.weight": "full_attention"}
LLAMA_BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_gate.bias"}

ARCHITECTURES = {
    "llama": Architecture(
        model_type="llama",
        model_class="LlamaForCausalLM",
        sizes=GROUPED | RMS | HEAD,
        optional=keys(KV_HEADS, *HEAD),
        biases=LLAMA_BIASES,
    ),
    "granite": Architecture(
        model_type="granite",
        model_class="GraniteForCausalLM",
        sizes=GROUPED | RMS | SCALES,
        optional=keys(KV_HEADS),
        biases=LLAMA_BIASES,
    ),
    "qwen2": Architecture(
        model_type="qwen2",
        model_class="Qwen2ForCausalLM",
        sizes=GROUPED | RMS,
        fixed={"use_sliding_window": False},
    ),
    "qwen3": Architecture(
        model_type="qwen3",
        model_class="Qwen3ForCausalLM",
        sizes=GROUPED | RMS | HEAD,
        fixed={"use_sliding_window": False},
    ),
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        model_class="Qwen3MoeForCausalLM",
        sizes=GROUPED | RMS | HEAD | EXPERTS,
        fixed={"use_sliding_window": False, "norm_topk_prob": True},
    ),
    "gemma2": Architecture(
        model_type="gemma2",
        model_class="Gemma2ForCausalLM",
        sizes=GEMMA,
        optional=keys("attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        model_class="Gemma3ForCausalLM",
        sizes=GEMMA,
        optional=keys("attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "phi3": Architecture(
        model_type="phi3",
        model_class="Phi3ForCausalLM",
        sizes=GROUPED | RMS | WINDOW,
        optional=keys(KV_HEADS, *WINDOW),
        is_partial=True,
    ),
    "starcoder2": Architecture(
        model_type="starcoder2",
        model_class="Starcoder2ForCausalLM",
        sizes=GROUPED | WINDOW | {"attention.layer_norm_epsilon": "norm_epsilon"},
        optional=keys(*WINDOW),
        biases={"use_bias": "attn_q.bias"},
        fixed={"sliding_window": None},
    ),
    "nemotron": Architecture(
        model_type="nemotron",
        model_class="NemotronForCausalLM",
        sizes=GROUPED | HEAD | {"attention.layer_norm_epsilon": "norm_eps"},
        optional=keys(*HEAD),
        is_partial=True,
    ),
    "gemma": Architecture(
        model_type="gemma",
        model_class="GemmaForCausalLM",
        sizes=GROUPED | RMS | HEAD,
        optional=keys(KV_HEADS),
    ),
    "gemma3n": Architecture(
        model_type="gemma3n_text",
        model_class="Gemma3nForCausalLM",
        sizes=GROUPED
        | RMS
        | HEAD
        | WINDOW
        | {
            "altup.active_idx": "altup_active_idx",
            "altup.num_inputs": "altup_num_inputs",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        # All of its models have this limit: llama.cpp's too, where a file has none.
        optional=keys("final_logit_softcapping"),
        fields=gemma3n_fields,
        constants=dict.fromkeys(
            ("activation_sparsity_scale", "attention.sliding_window_pattern", "rope.freq_base_swa"),
            ANYTHING,
        ),
    ),
    "gemma4": Architecture(
        model_type="gemma4_text",
        model_class="Gemma4ForCausalLM",
        sizes={key: field for key, field in COMMON.items() if key != "feed_forward_length"}
        | RMS
        | WINDOW
        | {
            "attention.key_length": "global_head_dim",
            "attention.key_length_swa": "head_dim",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "final_logit_softcapping": "final_logit_softcapping",
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        optional=keys(
            "final_logit_softcapping",
            "expert_count",
            "expert_used_count",
            "expert_feed_forward_length",
        ),
        fields=gemma4_fields,
        constants=dict.fromkeys(
            (
                "feed_forward_length",
                "attention.head_count_kv",
                "attention.sliding_window_pattern",
                "rope.freq_base_swa",
                "rope.dimension_count_swa",
            ),
            ANYTHING,
        ),
    ),
    "smollm3": Architecture(
        model_type="smollm3",
        model_class="SmolLM3ForCausalLM",
        sizes=GROUPED | RMS,
        biases=LLAMA_BIASES,
    ),
    "mistral3": Architecture(
        model_type="ministral3",
        model_class="Ministral3ForCausalLM",
        sizes=GROUPED | RMS | HEAD,
        fixed={"sliding_window": None},
    ),
    "olmo2": Architecture(
        model_type="olmo2",
        model_class="Olmo2ForCausalLM",
        sizes=GROUPED | RMS,
        optional=keys(KV_HEADS),
    ),
    "exaone4": Architecture(
        model_type="exaone4",
        model_class="Exaone4ForCausalLM",
        sizes=GROUPED | RMS | HEAD | WINDOW,
        optional=keys(*HEAD, *WINDOW),
        fixed={"sliding_window": None},
    ),
    "glm4": Architecture(
        model_type="glm4",
        model_class="Glm4ForCausalLM",
        sizes=GROUPED | RMS | HEAD,
        optional=keys(*HEAD),
        biases={"attention_bias": "attn_q.bias"},
        is_partial=True,
    ),
    "seed_oss": Architecture(
        model_type="seed_oss",
        model_class="SeedOssForCausalLM",
        sizes=GROUPED | RMS | HEAD,
        biases={
            "attention_bias": "attn_q.bias",
            "attention_out_bias": "attn_output.bias",
            "mlp_bias": "ffn_gate.bias",
        },
    ),
    "ernie4_5": Architecture(
        model_type="ernie4_5",
        model_class="Ernie4_5ForCausalLM",
        sizes=GROUPED | RMS | HEAD,
        optional=keys(*HEAD),
        biases={"use_bias": "attn_q.bias"},
    ),
    "gpt-oss": Architecture(
        model_type="gpt_oss",
        model_class="GptOssForCausalLM",
        sizes=GROUPED
        | RMS
        | HEAD
        | WINDOW
        | {
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
        optional=keys("feed_forward_length"),
        yarn={"truncate": False},
        constants={},
    ),
    "qwen3next": Architecture(
        model_type="qwen3_next",
        model_class="Qwen3NextForCausalLM",
        sizes=GROUPED | RMS | HEAD | EXPERTS | SHARED_EXPERT | DELTA_RULE,
        optional=keys("feed_forward_length"),
        fixed={"norm_topk_prob": True},
        is_partial=True,
        kinds=LINEAR,
        shares=VALUE_HEADS,
        constants={},
    ),
    "qwen35": Architecture(
        model_type="qwen3_5_text",
        model_class="Qwen3_5ForCausalLM",
        sizes=GROUPED | RMS | HEAD | DELTA_RULE,
        is_partial=True,
        has_axes=True,
        kinds=LINEAR,
        shares=VALUE_HEADS,
        constants={},
    ),
    "qwen35moe": Architecture(
        model_type="qwen3_5_moe_text",
        model_class="Qwen3_5MoeForCausalLM",
        sizes=GROUPED | RMS | HEAD | EXPERTS | SHARED_EXPERT | DELTA_RULE,
        optional=keys("feed_forward_length"),
        is_partial=True,
        has_axes=True,
        kinds=LINEAR,
        shares=VALUE_HEADS,
        constants={},
    ),
    **LATER,
    "lfm2": Architecture(
        model_type="lfm2",
        model_class="Lfm2ForCausalLM",
        sizes=GROUPED
        | {
            "attention.layer_norm_rms_epsilon": "norm_eps",
            "shortconv.l_cache": "conv_L_cache",
        },
        kinds={"shortconv.conv.weight": "conv", "attn_k.weight": "full_attention"},
        fixed={"block_auto_adjust_ff_dim": False},
        biases={"conv_bias": "shortconv.in_proj.bias"},
    ),
}
"""By their names in llama.cpp."""

WINDOWED = {
    "olmo2": Architecture(
        model_type="olmo3",
        model_class="Olmo3ForCausalLM",
        sizes=GROUPED | RMS | WINDOW,
        optional=keys(KV_HEADS),
    )
}
"""By the same names, of models whose layers see windows."""
