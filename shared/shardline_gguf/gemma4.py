"""What Gemma 4's metadata mean in its config, beyond sizes: its layers that see windows and those
that see all have heads of other sizes, and some have no keys of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Never

from shardline_gguf.gguf_header import TensorPlace
from shardline_gguf.metadata import SINGLE, Metadata, decimal
from shardline_gguf.refusal import refuse

PATTERN = "attention.sliding_window_pattern"
FACTORS = "rope_freqs.weight"
UNROTATED = 1e30
"""The factor of dimensions that are not rotated."""
FULL, WINDOW = "full_attention", "sliding_attention"
USUAL_THETA = 10_000.0
SUPPRESSED = "tokenizer.ggml.suppress_tokens"


def gemma4_fields(
    metadata: Metadata, config: Mapping[str, Any], tensors: Mapping[str, TensorPlace]
) -> dict[str, Any]:
    """Returns the fields that no one number means. Raises Invalid for a file that is none of
    Gemma 4's."""
    return _Gemma4(metadata, config, tensors).fields()


class _Gemma4:
    def __init__(
        self, metadata: Metadata, config: Mapping[str, Any], tensors: Mapping[str, TensorPlace]
    ) -> None:
        self._metadata = metadata
        self._config = config
        self._tensors = tensors
        self._num_layers = config["num_hidden_layers"]

    def fields(self) -> dict[str, Any]:
        pattern = self._metadata.get(PATTERN)
        if not isinstance(pattern, list) or len(pattern) != self._num_layers or not any(pattern):
            self._refuse(f"has no {self._metadata.name}.{PATTERN} of {self._num_layers} layers")
        if self._metadata.in_header(SUPPRESSED):
            self._refuse(f"has {SUPPRESSED}, which are not applied")
        kinds = [WINDOW if each else FULL for each in pattern]
        embedding = self._tensors.get("per_layer_token_embd.weight")
        return {
            "layer_types": kinds,
            "enable_moe_block": bool(self._config.get("num_experts")),
            "vocab_size_per_layer_input": embedding.shape[0] if embedding else 0,
            "rope_parameters": {
                WINDOW: {"rope_type": "default", "rope_theta": self._theta("freq_base_swa")},
                FULL: {
                    "rope_type": "proportional",
                    "rope_theta": self._theta("freq_base"),
                    "partial_rotary_factor": self._rotated(),
                },
            },
            **self._heads(kinds),
            **self._widths(),
        }

    def _refuse(self, problem: str) -> Never:
        refuse(f"{self._metadata.path} {problem}", "Give the model in safetensors")

    def _theta(self, key: str) -> float:
        found = self._metadata.get(f"rope.{key}")
        return decimal(found) if isinstance(found, float) else USUAL_THETA

    def _heads(self, kinds: list[str]) -> dict[str, Any]:
        """How many heads keys have, and in which layers values are keys."""
        found = self._metadata.get("attention.head_count_kv")
        listed = found if isinstance(found, list) else [found] * self._num_layers
        by_kind = {kind: set[Any]() for kind in (WINDOW, FULL)}
        for kind, heads in zip(kinds, listed, strict=False):
            by_kind[kind].add(heads)
        if len(listed) != self._num_layers or any(len(each) > 1 for each in by_kind.values()):
            self._refuse(f"has attention.head_count_kv {listed[:4]}, not one number for each type")
        own = self._num_layers - self._config["num_kv_shared_layers"]
        full = [layer for layer in range(own) if kinds[layer] == FULL]
        alike = [f"blk.{layer}.attn_v.weight" not in self._tensors for layer in full]
        if any(alike) and not all(alike):
            self._refuse("has values of their own in some layers that see all")
        in_windows, in_all = (next(iter(each), None) for each in by_kind.values())
        if not any(alike) and in_all not in (None, in_windows):
            self._refuse(f"has {in_all} heads of keys in layers that see all, not {in_windows}")
        found = {"num_key_value_heads": in_windows, "attention_k_eq_v": any(alike)}
        return found | ({"num_global_key_value_heads": in_all} if any(alike) else {})

    def _widths(self) -> dict[str, Any]:
        """How wide layers are: those without keys of their own may be twice as wide."""
        found = self._metadata.get("feed_forward_length")
        listed = found if isinstance(found, list) else [found] * self._num_layers
        shared = self._config["num_kv_shared_layers"]
        own = self._num_layers - shared
        width = listed[0] if listed else None
        alike = [width] * self._num_layers
        if type(width) is not int or listed not in (alike, [*alike[:own], *[2 * width] * shared]):
            self._refuse(f"has {self._metadata.name}.feed_forward_length {listed[:4]}")
        return {"intermediate_size": width, "use_double_wide_mlp": listed != alike}

    def _rotated(self) -> float:
        """Which share of a head is rotated in layers that see all."""
        place = self._tensors.get(FACTORS)
        num = int(self._config["global_head_dim"]) // 2
        if place is None:
            return 1.0
        if place.block.name != "F32" or place.shape != (num,):
            self._refuse(f"has {FACTORS} of shape {place.shape}, not F32 of {num}")
        with place.file.open("rb") as file:
            file.seek(place.start)
            factors = [each[0] for each in SINGLE.iter_unpack(file.read(place.num_bytes))]
        rotated = factors.count(1.0)
        unrotated = [SINGLE.unpack(SINGLE.pack(UNROTATED))[0]] * (num - rotated)
        if factors != [1.0] * rotated + unrotated:
            self._refuse(f"has {FACTORS} that are not 1, then {UNROTATED:g}")
        return rotated / num
