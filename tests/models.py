"""Tiny random causal LMs on disk, one folder per architecture. Owns their configs; knows no engine.

Weights are drawn wide, so that greedy outputs vary instead of repeating one token.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf

VOCAB_SIZE = 96
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MIXTURE: dict[str, Any] = {**COMMON, "num_experts_per_tok": 2}
HEADS_ALIKE: dict[str, Any] = {
    name: size for name, size in COMMON.items() if name != "num_key_value_heads"
}
OLDER: dict[str, Any] = {
    name: size for name, size in HEADS_ALIKE.items() if name != "intermediate_size"
}
DELTA_RULE: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 40,
}
WINDOW = 24
"""Shorter than the prompts of the tests, so that windows matter."""

LATE_SCALE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.5,
}
"""Queries are scaled from position 64 on."""

LLAMA4: dict[str, Any] = {
    **COMMON,
    "head_dim": 16,
    "intermediate_size": 24,
    "intermediate_size_mlp": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": WINDOW,
    "no_rope_layers": [1, 0, 1, 0],
    "floor_scale": 16,
    "attn_scale": 0.5,
}
"""Layers with and without a rotation, of experts and not. Queries are scaled from position 15
on."""

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**COMMON, tie_word_embeddings=False),
    "llama-tied": lambda: tf.LlamaConfig(**COMMON, tie_word_embeddings=True),
    "qwen2": lambda: tf.Qwen2Config(**COMMON),
    "qwen3": lambda: tf.Qwen3Config(**COMMON, head_dim=16),
    "mistral": lambda: tf.MistralConfig(**COMMON, head_dim=8, sliding_window=WINDOW),
    "ministral3": lambda: tf.Ministral3Config(
        **{**COMMON, "max_position_embeddings": 1024},
        head_dim=16,
        sliding_window=None,
        rope_parameters=LATE_SCALE,
    ),
    "gemma": lambda: tf.GemmaConfig(**COMMON, head_dim=16),
    "gemma2": lambda: tf.Gemma2Config(
        **COMMON, head_dim=16, sliding_window=WINDOW, attn_logit_softcapping=3.0
    ),
    "gemma3": lambda: tf.Gemma3TextConfig(**COMMON, head_dim=16, sliding_window=WINDOW),
    "phi": lambda: tf.PhiConfig(**COMMON),
    "phi3": lambda: tf.Phi3Config(**COMMON),
    "gpt-neox": lambda: tf.GPTNeoXConfig(**HEADS_ALIKE),
    "olmo2": lambda: tf.Olmo2Config(**COMMON),
    "granite": lambda: tf.GraniteConfig(
        **COMMON,
        embedding_multiplier=3.0,
        logits_scaling=4.0,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
    ),
    "cohere": lambda: tf.CohereConfig(**COMMON, logit_scale=0.25),
    "cohere2": lambda: tf.Cohere2Config(**COMMON, sliding_window=WINDOW),
    "starcoder2": lambda: tf.Starcoder2Config(**COMMON, sliding_window=WINDOW),
    "smollm3": lambda: tf.SmolLM3Config(**COMMON),
    "glm4": lambda: tf.Glm4Config(**COMMON, head_dim=16),
    "olmo3": lambda: tf.Olmo3Config(**COMMON, sliding_window=WINDOW),
    "seed-oss": lambda: tf.SeedOssConfig(**COMMON, head_dim=16),
    "ernie4.5": lambda: tf.Ernie4_5Config(**COMMON, head_dim=16),
    "exaone4": lambda: tf.Exaone4Config(**COMMON, sliding_window=WINDOW),
    "mixtral": lambda: tf.MixtralConfig(**MIXTURE, num_local_experts=4),
    "qwen3-moe": lambda: tf.Qwen3MoeConfig(**MIXTURE, num_experts=4, moe_intermediate_size=24),
    "gpt-oss": lambda: tf.GptOssConfig(
        **MIXTURE, head_dim=16, num_local_experts=4, sliding_window=WINDOW
    ),
    "gpt2": lambda: tf.GPT2Config(**OLDER),
    "gpt-bigcode": lambda: tf.GPTBigCodeConfig(**OLDER),
    "opt": lambda: tf.OPTConfig(**OLDER, ffn_dim=96, word_embed_proj_dim=24),
    "stablelm": lambda: tf.StableLmConfig(**COMMON),
    "nemotron": lambda: tf.NemotronConfig(**COMMON, head_dim=8),
    "olmoe": lambda: tf.OlmoeConfig(**MIXTURE, num_experts=4),
    "lfm2": lambda: tf.Lfm2Config(
        **COMMON, layer_types=["conv", "full_attention", "conv", "conv"], block_multiple_of=16
    ),
    "granite-4-dense": lambda: tf.GraniteMoeHybridConfig(
        **COMMON,
        shared_intermediate_size=48,
        num_local_experts=0,
        layer_types=["attention"] * 4,
        position_embedding_type="rope",
        residual_multiplier=0.5,
        mamba_n_heads=4,
        mamba_d_head=16,
    ),
    "granitemoehybrid": lambda: tf.GraniteMoeHybridConfig(
        **COMMON,
        shared_intermediate_size=48,
        num_local_experts=0,
        layer_types=["mamba", "attention", "mamba", "mamba"],
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=24,
        mamba_n_groups=2,
    ),
    "qwen3-next": lambda: tf.Qwen3NextConfig(
        **MIXTURE,
        head_dim=16,
        num_experts=4,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        **DELTA_RULE,
    ),
    "qwen3.5": lambda: tf.Qwen3_5TextConfig(
        **COMMON, head_dim=16, **DELTA_RULE, layer_types=["linear_attention", "full_attention"] * 2
    ),
    "olmo-hybrid": lambda: tf.OlmoHybridConfig(
        **COMMON, **DELTA_RULE, layer_types=["linear_attention", "full_attention"] * 2
    ),
    "nemotron-h": lambda: tf.NemotronHConfig(
        **{
            **MIXTURE,
            "layer_types": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        },
        head_dim=16,
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=24,
        n_groups=2,
    ),
    "bamba": lambda: tf.BambaConfig(
        **COMMON,
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=24,
        mamba_n_groups=2,
    ),
    # Every factor is another one, so that none can stand for another
    "falcon-h1": lambda: tf.FalconH1Config(
        **COMMON,
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=24,
        mamba_n_groups=2,
        embedding_multiplier=5.7,
        lm_head_multiplier=0.4,
        key_multiplier=0.6,
        attention_in_multiplier=1.2,
        attention_out_multiplier=0.95,
        mlp_multipliers=[0.8, 1.4],
        ssm_in_multiplier=1.5,
        ssm_out_multiplier=0.65,
        ssm_multipliers=[0.5, 0.7, 0.9, 1.1, 1.3],
    ),
    "llama4": lambda: tf.Llama4TextConfig(**LLAMA4),
    "granitemoe": lambda: tf.GraniteMoeConfig(**MIXTURE, num_local_experts=4),
}

RECURRENT = frozenset(
    {
        *(
            "lfm2",
            "granitemoehybrid",
            "qwen3-next",
            "qwen3.5",
            "qwen3.5-moe",
            "olmo-hybrid",
            "nemotron-h",
        ),
        *("bamba", "falcon-h1"),
    }
)
"""Of these, models with layers that keep a state, in the first half and in the second."""

GEMMA4: dict[str, Any] = {
    **COMMON,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "final_logit_softcapping": 30.0,
}
OTHER_CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3.5-moe": lambda: tf.Qwen3_5MoeTextConfig(
        **{name: size for name, size in MIXTURE.items() if name != "intermediate_size"},
        head_dim=16,
        num_experts=4,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        **DELTA_RULE,
        layer_types=["linear_attention", "full_attention"] * 2,
    ),
    "hunyuan-dense": lambda: tf.HunYuanDenseV1Config(**COMMON, head_dim=16),
    "ernie4.5-moe": lambda: tf.Ernie4_5_MoeConfig(
        **COMMON,
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=24,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
    ),
    "glm4-moe": lambda: tf.Glm4MoeConfig(
        **{**MIXTURE, "head_dim": 16},
        n_routed_experts=4,
        first_k_dense_replace=1,
        moe_intermediate_size=24,
        n_shared_experts=1,
        routed_scaling_factor=1.5,
        use_qk_norm=True,
    ),
    "granite-hybrid-moe": lambda: tf.GraniteMoeHybridConfig(
        **MIXTURE,
        shared_intermediate_size=48,
        num_local_experts=4,
        layer_types=["mamba", "attention", "mamba", "mamba"],
        position_embedding_type="rope",
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=24,
        mamba_n_groups=2,
    ),
    "nemotron-h-moe": lambda: tf.NemotronHConfig(
        **{**MIXTURE, "layer_types": ["linear_attention", "moe", "full_attention", "moe"]},
        head_dim=16,
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=24,
        n_groups=2,
        n_routed_experts=4,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=40,
        routed_scaling_factor=1.5,
    ),
    "gemma3n": lambda: tf.Gemma3nTextConfig(
        **COMMON,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB_SIZE,
        num_kv_shared_layers=2,
        laurel_rank=4,
        activation_sparsity_pattern=[0.95, 0.75, 0.0, 0.0],
    ),
    "gemma4": lambda: tf.Gemma4TextConfig(
        **GEMMA4,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB_SIZE,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
    ),
    "gemma4-moe": lambda: tf.Gemma4TextConfig(
        **{**GEMMA4, "num_global_key_value_heads": 1},
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=24,
        attention_k_eq_v=True,
    ),
}
"""Of tests that name them."""


def save_model(
    folder: Path, name: str = "llama", *, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """Saves the named tiny model, the same weights every time, with `changes` to its config.
    Returns its folder."""
    config = {**CONFIGS, **OTHER_CONFIGS}[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    return save_drawn(
        folder / name,
        lambda: tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32),
        dtype,
    )


def save_drawn(path: Path, make: Callable[[], Any], dtype: torch.dtype = torch.float32) -> Path:
    """Saves what `make` makes, with weights that are the same every time. Returns its folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = make()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.25)
            else:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    model.to(dtype).save_pretrained(path)
    return path


def edit_config(folder: Path, **changes: Any) -> None:
    """Changes fields of a saved model's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
