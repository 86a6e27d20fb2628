"""The context that a model's ropes give it, as its config states them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.stage.model.model_info import ModelInfo
from shardline_server.tokenize import Tokens
from tests.models import edit_config, save_model

PHI_ROPE: dict[str, Any] = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = "original_max_position_embeddings"


def test_the_context_ends_before_a_rope_follows_the_batch(tmp_path: Path) -> None:
    path = save_model(tmp_path)
    rope = {
        "rope_type": "dynamic",
        "factor": 4.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 128,
    }
    edit_config(path, rope_parameters=rope)

    assert ModelInfo.read(path).context_length == 128


@pytest.mark.parametrize(
    ("positions", "rope", "context"),
    [
        (32_768, {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32_768}, 131_072),
        (32_768, {"rope_type": "yarn", "factor": 4.0}, 131_072),
        (131_072, {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32_768}, 131_072),
        (163_840, {"rope_type": "yarn", "factor": 40, ORIGINAL: 4_096}, 163_840),
        (4_096, {"type": "linear", "factor": 4.0}, 16_384),
        (4_096, {"rope_type": "linear", "factor": 2.5}, 10_240),
        (131_072, LLAMA_3 | {ORIGINAL: 8_192}, 131_072),
        (4_096, {"rope_type": "dynamic", "factor": 4.0}, 4_096),
        (4_096, {"rope_type": "default"}, 4_096),
    ],
)
def test_the_context_is_the_one_that_the_ropes_factor_makes(
    positions: int, rope: dict[str, Any], context: int, tmp_path: Path
) -> None:
    path = save_model(tmp_path)
    edit_config(path, rope_parameters=None, rope_scaling=rope, max_position_embeddings=positions)

    assert ModelInfo.read(path).context_length == context


def test_ropes_of_layers_keep_the_stated_context(tmp_path: Path) -> None:
    path = save_model(tmp_path, "gemma3")
    edit_config(
        path,
        rope_parameters=None,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        max_position_embeddings=4096,
    )

    assert ModelInfo.read(path).context_length == 4096


def test_a_longrope_with_one_kind_of_factors_reaches_all_its_positions(tmp_path: Path) -> None:
    path = save_model(tmp_path, "phi3")
    rope = PHI_ROPE | {"type": "longrope"}
    edit_config(
        path,
        rope_parameters=None,
        rope_scaling=rope,
        max_position_embeddings=4096,
        **{ORIGINAL: 128},
    )
    with capture_logs() as logs:
        assert ModelInfo.read(path).context_length == 128
    assert [(line["log_level"], line["context"], line["positions"]) for line in logs] == [
        ("warning", 128, 4096)
    ]

    rope |= {"short_factor": rope["long_factor"]}
    edit_config(path, rope_scaling=rope)

    assert ModelInfo.read(path).context_length == 4096

    # Phi-3.5-MoE scales attention otherwise too
    edit_config(path, rope_scaling=rope | {"short_mscale": 1.2, "long_mscale": 1.24})

    assert ModelInfo.read(path).context_length == 128


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "phi3", "rope_scaling": PHI_ROPE | {"type": "longrope"}, ORIGINAL: 128},
        {"rope_scaling": {"type": "dynamic", "factor": 4.0, ORIGINAL: 128}},
    ],
    ids=["phi-3-128k", "legacy dynamic"],
)
def test_doors_and_heads_read_a_rope_of_older_configs_alike(
    config: dict[str, Any], tmp_path: Path
) -> None:
    path = save_model(tmp_path, config.get("model_type", "llama"))
    edit_config(path, rope_parameters=None, max_position_embeddings=4096, **config)
    info = ModelInfo.read(path)

    tokens = Tokens.from_row(info.row(name="m", fingerprint="f"))

    assert tokens.context_length == info.context_length == 128
    assert (tokens.vocab_size, tokens.eos_ids) == (info.vocab_size, info.eos_ids) == (96, (2,))
