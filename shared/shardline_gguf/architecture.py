"""How the config of transformers is made of a GGUF file's metadata: what architectures have in
common.

Keys of metadata stand without the architecture's name before them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

ANYTHING = object()
"""What a key says that is looked at otherwise."""

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
SHARED_EXPERT = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
"""Granite's."""
DELTA_RULE = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
VALUE_HEADS = {"ssm.inner_size": ("linear_value_head_dim", "linear_num_value_heads")}
EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
KNOWN = frozenset(
    {
        "vocab_size",
        "tensor_data_layout",
        "attention.key_length",
        "attention.value_length",
        "rope.freq_base",
        "rope.dimension_count",
        "rope.dimension_sections",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "full_attention_interval",
        "attention.sliding_window_pattern",
        "attention.value_length_swa",
        "nextn_predict_layers",
    }
)
"""Keys of every architecture that a rope is made of, or that repeat what tensors and others say."""


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
    yarn: Mapping[str, object] = field(default_factory=dict)
    """What all models of the architecture have in YaRN's parameters, and no file names."""
    has_axes: bool = False
    """Whether positions of several axes are read: those of a text are alike."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Types of layers by a tensor that only such a layer has."""
    shares: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Fields by keys that name a product of the first field and the second, which is known."""
    fields: Callable[[Any, Mapping[str, Any], Mapping[str, Any]], dict[str, Any]] | None = None
    """Returns fields that no one number means, of metadata, sizes and tensors."""
    constants: Mapping[str, object] | None = None
    """What other keys must say, if a file has them. None: other keys are not looked at."""


def keys(*names: str) -> frozenset[str]:
    return frozenset(names)


KV_HEADS = "attention.head_count_kv"
