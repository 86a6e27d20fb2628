"""What a config says of a model's weights agrees with the model that transformers makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from shardline.base.errors import Invalid
from shardline_costs import ModelCosts
from tests.models import CONFIGS

NORMS = 0.06
"""Norms and biases are left out. Models of tests are small, so that they are more there."""


def packed_in(bits: int) -> dict[str, Any]:
    """What compressed-tensors writes of one group of layers."""
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": bits, "group_size": 128}}},
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_of_each_layer(name: str) -> None:
    config = CONFIGS[name]()
    costs = ModelCosts.of(json.loads(config.to_json_string(use_diff=False)))
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(config)
    real = [_num_weights(layer) for layer in _layers(model)]
    assert [kind.num_weights for kind in costs.layers] == pytest.approx(real, rel=NORMS)
    assert costs.num_weights == pytest.approx(
        _num_weights(model) - _num_positions(model), rel=NORMS
    )


def _num_weights(module: torch.nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def _num_positions(model: tf.PreTrainedModel) -> int:
    """Weights of embeddings that are not of tokens."""
    tokens = model.get_input_embeddings()
    embeddings = [
        each
        for each in model.modules()
        if isinstance(each, torch.nn.Embedding) and each is not tokens
    ]
    return sum(map(_num_weights, embeddings))


def _layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    return max(
        (each for each in model.modules() if isinstance(each, torch.nn.ModuleList)),
        key=lambda each: len(list(each.parameters())),
    )


def test_kinds_of_layers_are_told_apart() -> None:
    assert list(ModelCosts.of(CONFIGS["gemma2"]().to_dict()).kinds) == [
        "sliding_attention",
        "full_attention",
    ]
    (experts,) = ModelCosts.of(CONFIGS["mixtral"]().to_dict()).kinds.values()
    assert experts.name == "full_attention+experts"
    assert sum(a * b for a, b in experts.products) < experts.num_weights, (
        "a row goes through two experts of four"
    )


def test_a_config_without_sizes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2, "hidden_size": 8}')
    with pytest.raises(Invalid, match=r"config\.json has no num_attention_heads or n_head"):
        ModelCosts.read(tmp_path)
    with pytest.raises(Invalid, match="cannot be read"):
        ModelCosts.read(tmp_path / "absent")


@pytest.mark.parametrize(
    ("quantization", "weight_bytes"),
    [
        ({"quant_method": "gptq", "bits": 4}, 20 / 32),
        ({"quant_method": "gptq", "bits": 8}, 34 / 32),
        ({"quant_method": "awq", "bits": 4}, 20 / 32),
        (packed_in(4), 20 / 32),
        (packed_in(8), 34 / 32),
        # Unpacked, and fitted in 4 bits
        ({**packed_in(8), "format": "int-quantized"}, 20 / 32),
    ],
)
def test_plans_know_the_bits_of_a_packed_checkpoint(
    quantization: dict[str, Any], weight_bytes: float, tmp_path: Path
) -> None:
    config = {**CONFIGS["llama"]().to_dict(), "quantization_config": quantization}
    older = {**CONFIGS["llama"]().to_dict(), "compression_config": quantization}
    for each in (config, {"text_config": config}, older):
        (tmp_path / "config.json").write_text(json.dumps(each))

        assert ModelCosts.read(tmp_path).weight_bytes("int4") == weight_bytes


def test_plans_know_that_experts_in_mxfp4_keep_their_scales_in_int8(tmp_path: Path) -> None:
    config = CONFIGS["gpt-oss"]().to_dict()
    shapes = []
    for extra in ({}, {"quantization_config": {"quant_method": "mxfp4"}}):
        (tmp_path / "config.json").write_text(json.dumps({**config, **extra}))
        costs = ModelCosts.read(tmp_path)
        assert costs.weight_bytes("int8") == (34 / 32 if extra else 1)
        assert (costs.weight_bytes("int4"), costs.weight_bytes("bfloat16")) == (20 / 32, 2)
        shapes.append(costs.shapes_id)
    assert shapes[0] == ModelCosts.of(config).shapes_id != shapes[1]
