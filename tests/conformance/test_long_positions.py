"""Positions beyond `original_max_position_embeddings`: a pipeline gives the logits of transformers'
own model, whatever the rope, in layers that are one call of the kernel and in others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from services.stage.device.device import Device
from shardline.contract.job import SamplingParams
from tests.chain import complete, load_chain, requests
from tests.models import COMMON, LATE_SCALE, LLAMA4, MIXTURE, WINDOW, save_drawn

ORIGINAL = 64
LENGTH = 600
"""Of the prompt, in tokens: more than nine times the original positions."""
BUDGET = 128
NUM_LOGPROBS = 5
TOLERANCE = 2e-4
"""Of a log-probability: sums of 600 keys in another order."""
SIZES: dict[str, Any] = {**COMMON, "num_hidden_layers": 2, "max_position_embeddings": 1024}
OF_HEADS: dict[str, Any] = {"head_dim": 16}


def rope(kind: str, **further: Any) -> dict[str, Any]:
    """Returns the parameters of a rope that is made for ORIGINAL positions."""
    lengths = {"original_max_position_embeddings": ORIGINAL}
    return {"rope_type": kind, "rope_theta": 1e4, "factor": 16.0, **lengths, **further}


LLAMA3 = rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0)
FACTORS = [1.0 + 0.5 * place for place in range(8)]
LONGROPE = rope("longrope", short_factor=FACTORS, long_factor=FACTORS)
BY_LAYER = {
    "full_attention": rope("linear"),
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama-default": lambda: tf.LlamaConfig(**SIZES),
    "llama-linear": lambda: tf.LlamaConfig(**SIZES, rope_parameters=rope("linear")),
    "llama-llama3": lambda: tf.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama-yarn": lambda: tf.LlamaConfig(**SIZES, rope_parameters=rope("yarn")),
    "llama-yarn-untruncated": lambda: tf.LlamaConfig(
        **SIZES, rope_parameters=rope("yarn", truncate=False, beta_fast=8.0, beta_slow=2.0)
    ),
    "llama-yarn-mscale": lambda: tf.LlamaConfig(
        **SIZES, rope_parameters=rope("yarn", mscale=0.7, mscale_all_dim=0.3)
    ),
    "llama-longrope": lambda: tf.LlamaConfig(**SIZES, **OF_HEADS, rope_parameters=LONGROPE),
    "llama-one-kv-head": lambda: tf.LlamaConfig(
        **{**SIZES, "num_key_value_heads": 1}, rope_parameters=LLAMA3
    ),
    "llama-eight-heads": lambda: tf.LlamaConfig(
        **{**SIZES, "num_attention_heads": 8}, **OF_HEADS, rope_parameters=rope("yarn")
    ),
    "qwen2-yarn": lambda: tf.Qwen2Config(**SIZES, rope_parameters=rope("yarn")),
    "qwen2-window": lambda: tf.Qwen2Config(
        **SIZES,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
        rope_parameters=rope("yarn"),
    ),
    "qwen3-yarn": lambda: tf.Qwen3Config(**SIZES, **OF_HEADS, rope_parameters=rope("yarn")),
    "mistral-window": lambda: tf.MistralConfig(
        **SIZES, **OF_HEADS, sliding_window=WINDOW, rope_parameters=rope("linear")
    ),
    "ministral3": lambda: tf.Ministral3Config(
        **SIZES, **OF_HEADS, sliding_window=None, rope_parameters=LATE_SCALE
    ),
    "ministral3-late": lambda: tf.Ministral3Config(
        **SIZES,
        **OF_HEADS,
        sliding_window=None,
        rope_parameters={
            **LATE_SCALE,
            "factor": 2.0,
            "original_max_position_embeddings": 512,
        },
    ),
    "llama4": lambda: tf.Llama4TextConfig(
        **{**LLAMA4, **SIZES, "no_rope_layers": [1, 0]}, rope_parameters=LLAMA3
    ),
    "phi3-longrope": lambda: tf.Phi3Config(
        **SIZES,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=rope("longrope", short_factor=FACTORS[:4], long_factor=FACTORS[:4]),
    ),
    "gemma3-by-layer": lambda: tf.Gemma3TextConfig(
        **SIZES,
        **OF_HEADS,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=BY_LAYER,
    ),
    "gpt-oss-yarn": lambda: tf.GptOssConfig(
        **{**MIXTURE, "num_hidden_layers": 2, "max_position_embeddings": 1024},
        **OF_HEADS,
        num_local_experts=4,
        sliding_window=WINDOW,
        rope_parameters=rope("yarn", truncate=False),
    ),
    "deepseek-v3-yarn": lambda: tf.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        first_k_dense_replace=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        rope_parameters=rope("yarn", mscale=1.0, mscale_all_dim=1.0),
    ),
    "glm4-linear": lambda: tf.Glm4Config(
        **SIZES, **OF_HEADS, rope_parameters=rope("linear", partial_rotary_factor=0.5)
    ),
    "stablelm-partial": lambda: tf.StableLmConfig(
        **SIZES, rope_parameters=rope("linear", partial_rotary_factor=0.25)
    ),
    "exaone4-llama3": lambda: tf.Exaone4Config(
        **SIZES, sliding_window=WINDOW, rope_parameters=LLAMA3
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_late_positions_give_the_logits_of_transformers(
    name: str, tmp_path: Path, device: Device
) -> None:
    config = CONFIGS[name]()
    make = tf.AutoModelForCausalLM.from_config
    path = save_drawn(tmp_path / name, lambda: make(config, dtype=torch.float32))
    prompt = torch.randint(3, 90, (LENGTH,), generator=torch.Generator().manual_seed(3))
    expected = _probabilities(path, prompt)
    stages = load_chain(path, 2, device, tmp_path)
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=NUM_LOGPROBS)

    (ended,) = complete(stages, requests([prompt.tolist()], params), budget=BUDGET, seats=4)

    assert ended.logprobs is not None
    (found,) = ended.logprobs
    ids, logprobs = zip(*found.top, strict=True)
    assert list(ids) == expected.indices.tolist()
    assert logprobs == pytest.approx(expected.values.tolist(), abs=TOLERANCE)


@torch.inference_mode()
def _probabilities(path: Path, prompt: torch.Tensor) -> Any:
    """The most likely tokens after the prompt, of the whole model in one forward."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = tf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **plain).eval()
    logits = model(input_ids=prompt[None], use_cache=False).logits[0, -1]
    return logits.log_softmax(-1).topk(NUM_LOGPROBS)
