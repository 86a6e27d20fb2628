"""The rope parameters that a GGUF file's metadata mean. Reads no tensor but the factors of a
rope."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shardline_gguf.architecture import TEMPERATURE, Architecture
from shardline_gguf.gguf_header import TensorPlace
from shardline_gguf.metadata import SINGLE, Metadata, decimal
from shardline_gguf.refusal import refuse

USUAL_THETA = 10_000.0
BETAS = ("beta_fast", "beta_slow")
FACTORS = ("rope.scaling.factor", "rope.scale_linear")
MAX_FACTORS = 4096


def rope_of(
    metadata: Metadata,
    architecture: Architecture,
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorPlace],
) -> dict[str, Any]:
    """Returns the `rope_parameters` of a config, whose sizes are known. Raises Invalid for a rope
    that is not read."""
    return _Rope(metadata, architecture).parameters(config, tensors)


class _Rope:
    def __init__(self, metadata: Metadata, architecture: Architecture) -> None:
        self._metadata = metadata
        self._architecture = architecture

    def parameters(
        self, config: Mapping[str, Any], tensors: Mapping[str, TensorPlace]
    ) -> dict[str, Any]:
        theta = self._metadata.get("rope.freq_base")
        base: dict[str, Any] = {"rope_theta": decimal(theta) if theta else USUAL_THETA}
        head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
        dimensions = self._metadata.get("rope.dimension_count") or head_dim
        if dimensions != head_dim:
            if not self._architecture.is_partial or not 0 < dimensions < head_dim:
                refuse(f"{self._metadata.path} has a rope of {dimensions} dimensions of {head_dim}")
            base["partial_rotary_factor"] = dimensions / head_dim
        elif self._architecture.is_partial:
            base["partial_rotary_factor"] = 1.0
        rope = base | self._scaling(config, tensors, dimensions // 2)
        if self._metadata.name == "mistral3":
            rope |= self._late_scale(config, rope)
        if self._metadata.name != "gemma3":
            return rope
        local: dict[str, Any] = {"rope_type": "default", "rope_theta": USUAL_THETA}
        return {"sliding_attention": local, "full_attention": rope}

    def _late_scale(
        self, config: Mapping[str, Any], rope: Mapping[str, Any]
    ) -> dict[str, float | int]:
        """Returns how queries are scaled beyond the original positions, and how YaRN scales all."""
        length = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
        found = {
            "llama_4_scaling_beta": decimal(self._metadata.get(TEMPERATURE) or 0.0),
            "original_max_position_embeddings": length,
        }
        multiplier = self._metadata.get("rope.scaling.yarn_log_multiplier")
        if multiplier:
            found |= {"mscale": 1.0, "mscale_all_dim": decimal(multiplier)}
        return found

    def _scaling(
        self, config: Mapping[str, Any], tensors: Mapping[str, TensorPlace], num_factors: int
    ) -> dict[str, Any]:
        names = ("rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight")
        long, short, both = (self._factors(tensors.get(name), num_factors) for name in names)
        original = self._metadata.get("rope.scaling.original_context_length")
        if both is not None:
            # Llama 3's scaling: the file has its factors, not its parameters.
            return {
                "rope_type": "longrope",
                "long_factor": both,
                "short_factor": both,
                "attention_factor": 1.0,
                "factor": 1.0,
                "original_max_position_embeddings": config["max_position_embeddings"],
            }
        if long is not None and short is not None:
            attention = self._metadata.get("rope.scaling.attn_factor")
            return {
                "rope_type": "longrope",
                "long_factor": long,
                "short_factor": short,
                "original_max_position_embeddings": original or config["max_position_embeddings"],
                **({} if attention is None else {"attention_factor": decimal(attention)}),
            }
        # Files of 2023 have the factor of a linear scaling alone.
        kind = self._metadata.get("rope.scaling.type") or "linear"
        factors = ((key, self._metadata.get(key)) for key in FACTORS)
        factor = next((self._metadata.number(*each) for each in factors if each[1]), 0)
        if kind == "none" or not factor or (kind == "linear" and factor == 1):
            return {"rope_type": "default"}
        if kind not in ("linear", "yarn"):
            refuse(
                f"{self._metadata.path} has rope.scaling.type {str(kind)[:80]!r}; "
                "read are linear, yarn and factors",
                "Give the model in safetensors",
            )
        scaling = {"rope_type": kind, "factor": float(factor)}
        if kind == "linear":
            return scaling
        length = original or config["max_position_embeddings"]
        scaling |= {"original_max_position_embeddings": length, **self._architecture.yarn}
        return scaling | self._yarn(float(factor))

    def _yarn(self, factor: float) -> dict[str, int | float]:
        """Returns YaRN's optional parameters. Raises Invalid where it scales attention otherwise
        than by its factor."""
        usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        for key in ("rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"):
            stated = self._metadata.get(key)
            scale = 1.0 if stated is None else self._metadata.number(key, stated)
            if not any(math.isclose(scale, each, rel_tol=1e-5) for each in (1.0, usual)):
                refuse(
                    f"{self._metadata.path} has {self._metadata.name}.{key} {scale}; "
                    f"read are 1 and YaRN's own {usual:.6g}",
                    "Give the model in safetensors",
                )
        values = {each: self._metadata.get(f"rope.scaling.yarn_{each}") for each in BETAS}
        return {
            beta: self._metadata.number(f"rope.scaling.yarn_{beta}", value)
            for beta, value in values.items()
            if value is not None
        }

    def _factors(self, place: TensorPlace | None, num: int) -> list[float] | None:
        if place is None:
            return None
        if place.block.name != "F32" or place.shape != (num,) or num > MAX_FACTORS:
            refuse(f"{place.file} has rope factors of shape {place.shape}, not F32 of {num}")
        with place.file.open("rb") as file:
            file.seek(place.start)
            content = file.read(place.num_bytes)
        return [decimal(each[0]) for each in SINGLE.iter_unpack(content)]
