"""What Gemma 3n's metadata mean in its config, beyond sizes: which layers see windows, and how many
of their activations are zeros."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shardline_gguf.gemma4 import FULL, PATTERN, WINDOW
from shardline_gguf.gguf_header import TensorPlace
from shardline_gguf.metadata import Metadata, decimal
from shardline_gguf.refusal import refuse

SPARSITY = "activation_sparsity_scale"
"""How many deviations above the mean an activation must be, layer by layer."""
LAUREL = "blk.0.laurel_l.weight"
THETA, WINDOW_THETA = 1_000_000.0, 10_000.0
DIGITS = 4
"""Of shares: files have what follows from them in single precision."""


def gemma3n_fields(
    metadata: Metadata, config: Mapping[str, Any], tensors: Mapping[str, TensorPlace]
) -> dict[str, Any]:
    """Returns the fields that no one number means. Raises Invalid for a file that is none of
    Gemma 3n's."""
    pattern, scales = metadata.get(PATTERN), metadata.get(SPARSITY)
    for key, found in ((PATTERN, pattern), (SPARSITY, scales)):
        if not isinstance(found, list) or len(found) != config["num_hidden_layers"]:
            refuse(f"{metadata.path} has no {metadata.name}.{key} of every layer")
    embedding, laurel = tensors.get("per_layer_token_embd.weight"), tensors.get(LAUREL)
    if embedding is None or laurel is None:
        refuse(f"{metadata.path} has no per_layer_token_embd.weight, or no {LAUREL}")
    theta = metadata.get("rope.freq_base")
    return {
        "layer_types": [WINDOW if each else FULL for each in pattern],
        "activation_sparsity_pattern": [_share_below(each) for each in scales],
        "vocab_size_per_layer_input": embedding.shape[0],
        "laurel_rank": laurel.shape[0],
        "altup_correct_scale": "blk.0.altup_correct_scale.weight" in tensors,
        "rope_parameters": {
            WINDOW: {
                "rope_type": "default",
                "rope_theta": decimal(metadata.get("rope.freq_base_swa") or WINDOW_THETA),
            },
            FULL: {"rope_type": "default", "rope_theta": decimal(theta or THETA)},
        },
    }


def _share_below(scale: float) -> float:
    """Returns which share of a normal distribution is below the mean plus so many deviations."""
    return round((1.0 + math.erf(scale / math.sqrt(2.0))) / 2.0, DIGITS)
