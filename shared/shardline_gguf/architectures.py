"""The architectures of GGUF files that are read, and what their metadata mean in a config of
transformers.

Keys of metadata stand without the architecture's name before them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

COMMON = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
GROUPED = COMMON | {"attention.head_count_kv": "num_key_value_heads"}
RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
HEAD = {"attention.key_length": "head_dim"}
WINDOW = {"attention.sliding_window": "sliding_window"}
GEMMA = (
    GROUPED
    | RMS
    | HEAD
    | WINDOW
    | {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    }
)
TEMPERATURE = "attention.temperature_scale"
EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How a config is made of the metadata of one architecture."""

    model_type: str
    model_class: str
    sizes: Mapping[str, str]
    """Fields of the config by keys of the metadata."""
    optional: frozenset[str] = frozenset()
    """Keys of `sizes` that a file need not have: the config's default holds then."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Values that differ from transformers' defaults."""
    biases: Mapping[str, str] = field(default_factory=dict)
    """Fields of the config that are true if the first layer has this tensor."""
    is_partial: bool = False
    """Whether a rope of fewer dimensions than a head's is a share of the head."""


def _all(*keys: str) -> frozenset[str]:
    return frozenset(keys)


KV_HEADS = "attention.head_count_kv"
LLAMA_BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_gate.bias"}

ARCHITECTURES = {
    "llama": Architecture(
        model_type="llama",
        model_class="LlamaForCausalLM",
        sizes=GROUPED | RMS | HEAD,
        optional=_all(KV_HEADS, *HEAD),
        biases=LLAMA_BIASES,
    ),
    "granite": Architecture(
        model_type="granite",
        model_class="GraniteForCausalLM",
        sizes=GROUPED
        | RMS
        | {
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        optional=_all(KV_HEADS),
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
        optional=_all("attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        model_class="Gemma3ForCausalLM",
        sizes=GEMMA,
        optional=_all("attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "phi3": Architecture(
        model_type="phi3",
        model_class="Phi3ForCausalLM",
        sizes=GROUPED | RMS | WINDOW,
        optional=_all(KV_HEADS, *WINDOW),
        is_partial=True,
    ),
    "starcoder2": Architecture(
        model_type="starcoder2",
        model_class="Starcoder2ForCausalLM",
        sizes=GROUPED | WINDOW | {"attention.layer_norm_epsilon": "norm_epsilon"},
        optional=_all(*WINDOW),
        biases={"use_bias": "attn_q.bias"},
        fixed={"sliding_window": None},
    ),
    "nemotron": Architecture(
        model_type="nemotron",
        model_class="NemotronForCausalLM",
        sizes=GROUPED | HEAD | {"attention.layer_norm_epsilon": "norm_eps"},
        optional=_all(*HEAD),
        is_partial=True,
    ),
    "gemma": Architecture(
        model_type="gemma",
        model_class="GemmaForCausalLM",
        sizes=GROUPED | RMS | HEAD,
        optional=_all(KV_HEADS),
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
        optional=_all(KV_HEADS),
    ),
    "exaone4": Architecture(
        model_type="exaone4",
        model_class="Exaone4ForCausalLM",
        sizes=GROUPED | RMS | HEAD | WINDOW,
        optional=_all(*HEAD, *WINDOW),
        fixed={"sliding_window": None},
    ),
    "glm4": Architecture(
        model_type="glm4",
        model_class="Glm4ForCausalLM",
        sizes=GROUPED | RMS | HEAD,
        optional=_all(*HEAD),
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
        optional=_all(*HEAD),
        biases={"use_bias": "attn_q.bias"},
    ),
    "lfm2": Architecture(
        model_type="lfm2",
        model_class="Lfm2ForCausalLM",
        sizes=GROUPED
        | {
            "attention.layer_norm_rms_epsilon": "norm_eps",
            "shortconv.l_cache": "conv_L_cache",
        },
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
        optional=_all(KV_HEADS),
    )
}
"""By the same names, of models whose layers see windows."""
