"""Miniatures of models: small, and of the same structure. Nothing here reads a weight."""

from __future__ import annotations

from typing import Any

import pytest
import transformers as tf

from services.stage.model.miniature import MIN_LAYERS, build_miniature, miniature_config

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 48,
    "long_factor": [4.0] * 48,
}
MAX_WEIGHTS = 10_000_000


@pytest.mark.parametrize(
    ("config", "heads", "kv_heads"),
    [
        (tf.LlamaConfig(hidden_size=8192, num_attention_heads=64, num_key_value_heads=8), 16, 2),
        (
            tf.Qwen3Config(
                hidden_size=5120, num_attention_heads=40, num_key_value_heads=8, head_dim=128
            ),
            10,
            2,
        ),
        (tf.OPTConfig(hidden_size=2048, max_position_embeddings=2048), 2, None),
        (tf.GPT2Config(n_head=25, n_embd=1600), 1, None),
        (tf.Phi3Config(rope_parameters=LONG_ROPE, pad_token_id=0), 2, 2),
    ],
    ids=["llama", "qwen3", "opt", "gpt2", "phi3"],
)
def test_a_miniature_keeps_query_heads_for_each_kv_head(
    config: Any, heads: int, kv_heads: int | None
) -> None:
    small = miniature_config(config)
    model = build_miniature(small)

    assert (small.num_attention_heads, getattr(small, "num_key_value_heads", None)) == (
        heads,
        kv_heads,
    )
    assert small.num_hidden_layers == MIN_LAYERS
    assert small.max_position_embeddings == config.max_position_embeddings
    assert model.num_parameters() < MAX_WEIGHTS


def test_a_miniature_has_every_kind_of_layer_and_a_short_window() -> None:
    kinds = ["sliding_attention"] * 6 + ["full_attention"] + ["sliding_attention"] * 5
    small = miniature_config(
        tf.Gemma3TextConfig(num_hidden_layers=12, layer_types=kinds, sliding_window=4096)
    )

    assert small.layer_types == kinds[:7]
    assert small.num_hidden_layers == 7
    assert small.sliding_window == 8
