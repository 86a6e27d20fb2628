"""What recurrent layers weigh, read from a config: products of their own, no KV, and a state for
each sequence, which a plan keeps room for."""

from __future__ import annotations

from typing import Any

import pytest

from shardline_costs.model_costs import ModelCosts

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}


@pytest.mark.parametrize(
    ("config", "products", "num_state"),
    [
        (
            {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
            ((64, 192), (64, 64)),
            2 * 64,
        ),
        (
            {
                "layers_block_type": ["linear_attention", "full_attention"],
                "mamba_n_heads": 8,
                "mamba_d_head": 16,
                "mamba_d_state": 32,
                "mamba_d_conv": 4,
            },
            ((64, 128 + 192 + 8), (128, 64)),
            128 * 32 + 3 * 192,
        ),
        (
            {
                "layer_types": ["linear_attention", "full_attention"],
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 32,
            },
            ((64, 192 + 128 + 8), (128, 64)),
            4 * 16 * 32 + 3 * 192,
        ),
    ],
    ids=["convolution", "state-space", "delta-rule"],
)
def test_a_recurrent_layer_has_a_state_and_no_kv(
    config: dict[str, Any], products: tuple[Any, ...], num_state: int
) -> None:
    recurrent, attention = ModelCosts.of(COMMON | config).layers

    assert recurrent.products[:2] == products
    assert (recurrent.kv_numbers, recurrent.state_bytes) == (0, 4 * num_state)
    assert (attention.kv_numbers, attention.state_bytes) == (64, 0)


def test_profiles_of_other_models_stay_valid() -> None:
    costs = ModelCosts.of(COMMON)
    assert costs.shapes_id == "89bf6e1ed11adf1e"
