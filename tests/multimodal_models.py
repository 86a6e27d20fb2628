"""Configs of tiny multimodal models, whose text alone stages compute. Knows no engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from services.stage.model.text_part import model_class
from tests.models import COMMON, LATE_SCALE, LLAMA4, MIXTURE, WINDOW, save_drawn

SIZES_OF_TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
}
SIGLIP: dict[str, Any] = {
    **SIZES_OF_TOWER,
    "num_hidden_layers": 2,
    "image_size": 28,
    "patch_size": 14,
}
M_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
HALF_M_ROPE = {**M_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
QWEN_VISION = {"depth": 2, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2}
QWEN3_VISION = {
    **QWEN_VISION,
    "hidden_size": 16,
    "intermediate_size": 24,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}


def of(kind: str, text: Any, vision: Any, **further: Any) -> Callable[[], Any]:
    """Returns what makes a container's config, its end of sequence that of its text."""
    make = getattr(tf, f"{kind}Config")
    common = {"text_config": text, "vision_config": vision, "eos_token_id": 2}
    return lambda: make(**common | further)


def sized(**further: Any) -> dict[str, Any]:
    """Returns the sizes of a language model, with others."""
    return {**COMMON, **further}


JOINED: dict[str, Any] = {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2}
QWEN_TOKENS = {
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
GEMMA4: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "vocab_size_per_layer_input": 96,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}
GEMMA4_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
GEMMA3N: dict[str, Any] = {
    **COMMON,
    **JOINED,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "vocab_size_per_layer_input": 96,
    "laurel_rank": 4,
    "altup_num_inputs": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
}

CONTAINERS: dict[str, Callable[[], Any]] = {
    "gemma3-vision": of(
        "Gemma3",
        sized(head_dim=16, sliding_window=WINDOW),
        SIGLIP,
        mm_tokens_per_image=1,
        image_token_index=90,
    ),
    "mistral3": of(
        "Mistral3",
        sized(model_type="mistral", head_dim=8, sliding_window=None),
        {**SIGLIP, "model_type": "pixtral", "head_dim": 8},
        image_token_index=90,
    ),
    "ministral3-vision": of(
        "Mistral3",
        sized(
            model_type="ministral3",
            head_dim=16,
            sliding_window=None,
            max_position_embeddings=1024,
            rope_parameters=LATE_SCALE,
        ),
        {**SIGLIP, "model_type": "pixtral", "head_dim": 8},
        image_token_index=90,
    ),
    "qwen2-vl": of(
        "Qwen2VL",
        sized(rope_parameters=M_ROPE, head_dim=16, hidden_size=64),
        {**QWEN_VISION, "embed_dim": 16, "hidden_size": 64},
        **QWEN_TOKENS,
    ),
    "qwen2.5-vl": of(
        "Qwen2_5_VL",
        sized(rope_parameters=M_ROPE, hidden_size=64),
        {**QWEN_VISION, "hidden_size": 16, "out_hidden_size": 64, "intermediate_size": 24},
        **QWEN_TOKENS,
    ),
    "qwen3-vl": of(
        "Qwen3VL", sized(rope_parameters=M_ROPE, head_dim=16), QWEN3_VISION, **QWEN_TOKENS
    ),
    "qwen3-vl-moe": of(
        "Qwen3VLMoe",
        {
            **MIXTURE,
            "rope_parameters": M_ROPE,
            "head_dim": 16,
            "num_experts": 4,
            "moe_intermediate_size": 24,
        },
        QWEN3_VISION,
        **QWEN_TOKENS,
    ),
    "llava": of(
        "Llava", sized(model_type="llama"), {**SIGLIP, "model_type": "siglip_vision_model"}
    ),
    "llava-next": of(
        "LlavaNext", sized(model_type="mistral"), {**SIGLIP, "model_type": "clip_vision_model"}
    ),
    "llava-onevision": of(
        "LlavaOnevision", sized(model_type="qwen2"), {**SIGLIP, "model_type": "siglip_vision_model"}
    ),
    "internvl": of(
        "InternVL",
        sized(model_type="qwen3", head_dim=16),
        {**SIGLIP, "image_size": [28, 28], "patch_size": [14, 14]},
    ),
    "smolvlm": of("SmolVLM", sized(model_type="llama"), SIGLIP, image_token_id=90),
    "idefics3": of("Idefics3", sized(model_type="llama"), SIGLIP, image_token_id=90),
    "gemma4-vision": of(
        "Gemma4",
        sized(**GEMMA4, hidden_size_per_layer_input=0, num_kv_shared_layers=0),
        GEMMA4_VISION,
    ),
    "gemma4-moe": of(
        "Gemma4",
        sized(
            **GEMMA4,
            hidden_size_per_layer_input=0,
            num_kv_shared_layers=0,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=24,
        ),
        GEMMA4_VISION,
    ),
    "aya-vision": of(
        "AyaVision",
        sized(model_type="cohere2", sliding_window=WINDOW, logit_scale=0.25),
        {**SIGLIP, "model_type": "siglip_vision_model"},
        image_token_index=90,
    ),
    "cohere2-vision": of(
        "Cohere2Vision",
        sized(model_type="cohere2", sliding_window=WINDOW),
        {**SIGLIP, "model_type": "siglip_vision_model"},
        image_token_id=90,
    ),
    "gemma4-joined": of("Gemma4", sized(**GEMMA4, **JOINED), GEMMA4_VISION),
    "gemma3n-text": lambda: tf.Gemma3nTextConfig(**GEMMA3N),
    "gemma3n": lambda: tf.Gemma3nConfig(
        text_config=GEMMA3N,
        vision_config={"hidden_size": 16, "vocab_size": 4, "vocab_offset": 96},
        audio_config={
            "hidden_size": 16,
            "vocab_size": 2,
            "vocab_offset": 100,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 1,
            "input_feat_size": 16,
            "sscp_conv_channel_size": (4, 4),
        },
    ),
    "phi4-multimodal": lambda: tf.Phi4MultimodalConfig(
        **COMMON,
        vision_config={**SIGLIP, "crop_size": 28},
        audio_config={**SIZES_OF_TOWER, "num_blocks": 1},
    ),
    "llama4-vision": of(
        "Llama4",
        {**LLAMA4, "use_qk_norm": False},
        {
            **SIGLIP,
            "intermediate_size": 64,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
            "vision_output_dim": 16,
        },
    ),
    "glm4v": of(
        "Glm4v",
        sized(
            rope_parameters={**M_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
            head_dim=16,
        ),
        {
            "depth": 2,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 24,
            "out_hidden_size": 32,
        },
        image_token_id=90,
        video_token_id=91,
    ),
}


def save_container(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    """Saves the named tiny model with all its parts, the same weights every time. Returns its
    folder."""
    config = CONTAINERS[name]()
    return save_drawn(folder / name, lambda: model_class(config)(config), dtype)
