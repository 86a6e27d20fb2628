"""Models and measured devices for the planner's tests: figures that are made up, and simple."""

from __future__ import annotations

from typing import Any

from shardline_costs import DeviceProfile, LayerTimes, ModelCosts

LAYER_S = 0.001
MODEL_ID = "of-tests"


def model(
    num_layers: int = 12, *, kinds: tuple[str, ...] = ("full_attention",), **other: Any
) -> ModelCosts:
    """A model whose kinds of layers take turns."""
    config = {
        "num_hidden_layers": num_layers,
        "layer_types": [kinds[number % len(kinds)] for number in range(num_layers)],
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "tie_word_embeddings": False,
    }
    return ModelCosts.of(config | other)


def device(name: str, *, slower: float = 1.0, tail_s: float = 0.0, **other: Any) -> DeviceProfile:
    """A device whose steps are by this factor slower than one millisecond a layer and 64 rows."""
    kinds = other.pop("kinds", ("full_attention",))
    layer = LayerTimes(
        rows=((1, LAYER_S * slower), (64, LAYER_S * slower), (256, 4 * LAYER_S * slower)),
        decode_context_s=0.0,
        prefill_context_s=0.0,
    )
    fields: dict[str, Any] = {
        "device": name,
        "host": "host",
        "hardware": name.partition(":")[0],
        "dtype": "float32",
        "model": MODEL_ID,
        "memory_bytes": 1 << 30,
        "layers": dict.fromkeys(kinds, layer),
        "step": ((1, 0.0),),
        "sampled": ((1, tail_s * slower),),
        "tail_prefill_row_s": 0.0,
    }
    return DeviceProfile(**(fields | other))
