"""The config of transformers that a GGUF file's metadata mean. Reads no weight but the factors of a
rope."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from shardline_gguf.architectures import (
    ARCHITECTURES,
    KV_HEADS,
    TEMPERATURE,
    WINDOWED,
    Architecture,
)
from shardline_gguf.gguf_files import is_gguf, model_in, read_parts
from shardline_gguf.gguf_header import IN_4_BITS, GgufHeader, TensorPlace
from shardline_gguf.refusal import refuse

CONFIG = "config.json"
FORMAT = 3
"""Raised when a file comes to mean other weights or texts: fingerprints differ then."""
TOKENS = "tokenizer.ggml.tokens"
TOKEN_TYPES = "tokenizer.ggml.token_type"  # noqa: S105 (a key of metadata)
CONTROL = 3
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
ENDS_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
"""Control tokens that end a reply: a header names one, a model's generation config all."""
USUAL_THETA = 10_000.0
BETAS = ("beta_fast", "beta_slow")
MAX_LAYERS = 4096
MAX_FACTORS = 4096
SINGLE = struct.Struct("<f")
WINDOW = "attention.sliding_window"
WINDOWS = "attention.sliding_window_pattern"
"""Whether a layer sees a window, layer by layer."""

GEMMA_PARTS = {"gemma2": 46, "gemma3": 62}
"""Layers of the largest models: these alone scale queries by a share of the hidden size."""


def read_config(model: Path) -> dict[str, Any]:
    """Returns a config as JSON has it: of a model's folder, or of a GGUF file, or of a folder that
    holds one. Raises Invalid for a GGUF file that cannot be read, OSError or ValueError
    without a config."""
    found = model if is_gguf(model) else None
    if found is None and not (model / CONFIG).is_file():
        found = model_in(model)
    if found is None:
        return msgspec.json.decode((model / CONFIG).read_bytes(), type=dict[str, Any])
    return config_of(*read_parts(found))


def share_above_4_bits(model: Path, config: Mapping[str, Any]) -> float:
    """Returns which share of the numbers in matrices of layers have more bits in int4, as those of
    blocks that are not of 4 bits; experts never have. 0 for a model that its config does not name a
    GGUF file's. Raises Invalid for a file that cannot be read."""
    found = model if is_gguf(model) else model_in(model) if "gguf_format" in config else None
    if found is None:
        return 0.0
    in_layers = [
        place
        for name, place in read_parts(found)[1].items()
        if name.startswith("blk.") and len(place.shape) >= 2
    ]
    above = [
        math.prod(place.shape)
        for place in in_layers
        if len(place.shape) == 2
        and place.block.num_numbers > 1
        and place.block.name not in IN_4_BITS
    ]
    return sum(above) / max(1, sum(math.prod(place.shape) for place in in_layers))


def config_of(header: GgufHeader, tensors: Mapping[str, TensorPlace]) -> dict[str, Any]:
    """Returns the config of a model by its header and the tensors of all its parts. Raises Invalid
    for an architecture that is not read, or a size that is missing."""
    name = header.architecture
    has_window = f"{name}.{WINDOW}" in header.metadata
    architecture = WINDOWED.get(name) if has_window else None
    architecture = architecture or ARCHITECTURES.get(name)
    if architecture is None:
        known = ", ".join(sorted(ARCHITECTURES))
        refuse(
            f"{header.path} is of the architecture {name[:80]!r}; GGUF files are read of {known}",
            "Give the model in safetensors",
        )
    config = _Metadata(header, name).config(architecture, tensors)
    eos = eos_ids(header)
    return config | {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "bos_token_id": _token_id(header, "bos_token_id"),
        "eos_token_id": eos[0] if eos else None,
        "pad_token_id": _token_id(header, "padding_token_id"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "gguf_format": FORMAT,
    }


def eos_ids(header: GgufHeader) -> tuple[int, ...]:
    """Returns the ids that end a text: those that the header names, and control tokens that are
    known to end a turn."""
    named = [_token_id(header, key) for key in ENDS]
    tokens = header.metadata.get(TOKENS) or []
    kinds = header.metadata.get(TOKEN_TYPES) or []
    known = [
        number
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == CONTROL and token in ENDS_OF_TURN
    ]
    return tuple(dict.fromkeys(one for one in (*named, *known) if one is not None))


def _token_id(header: GgufHeader, key: str) -> int | None:
    found = header.metadata.get(f"tokenizer.ggml.{key}")
    tokens = header.metadata.get(TOKENS) or []
    # -1, and as unsigned its like, stands for no token.
    return found if type(found) is int and 0 <= found < len(tokens) else None


class _Metadata:
    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self._header = header
        self._name = architecture

    def config(
        self, architecture: Architecture, tensors: Mapping[str, TensorPlace]
    ) -> dict[str, Any]:
        config: dict[str, Any] = dict(architecture.fixed)
        for key, field in architecture.sizes.items():
            value = self._get(key)
            if value is not None:
                config[field] = self._number(key, value)
            elif key not in architecture.optional:
                refuse(f"{self._header.path} has no {self._name}.{key}")
        if not 1 <= config["num_hidden_layers"] <= MAX_LAYERS:
            refuse(f"{self._header.path} would have {config['num_hidden_layers']:,} layers")
        if self._get("expert_count") and "num_experts" not in config:
            refuse(
                f"{self._header.path} is of the architecture {self._name!r} with experts, "
                "which is not read",
                "Give the model in safetensors",
            )
        config |= {field: f"blk.0.{end}" in tensors for field, end in architecture.biases.items()}
        config["vocab_size"] = self._vocab_size(tensors)
        head_dim = self._head_dim(config)
        if head_dim is not None and "attention.key_length" in architecture.sizes:
            config["head_dim"] = head_dim
        if any(self._get("rope.dimension_sections") or ()):
            refuse(f"{self._header.path} has rotations of several axes, which are not read")
        self._layer_types(config)
        self._gemma(config)
        if self._name == "phi3":
            self._phi3(config)
        config["rope_parameters"] = self._rope(config, tensors, architecture)
        return config

    def _get(self, key: str) -> Any:
        return self._header.metadata.get(f"{self._name}.{key}")

    def _number(self, key: str, value: Any) -> int | float:
        """One number: a file may list one for each layer, which must be equal."""
        values = value if isinstance(value, list) else [value]
        if self._name == "lfm2" and key == KV_HEADS:
            values = [each for each in values if each] or values  # 0: a layer of convolutions
        first = values[0] if values else None
        if not isinstance(first, int | float) or any(each != first for each in values):
            refuse(f"{self._header.path} has {self._name}.{key} {values[:4]}, not one number")
        if not math.isfinite(first) or first < 0:
            refuse(f"{self._header.path} has {self._name}.{key} {first}")
        return _decimal(first) if isinstance(first, float) else first

    def _vocab_size(self, tensors: Mapping[str, TensorPlace]) -> int:
        embedding = tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            refuse(f"{self._header.path} has no token_embd.weight")
        rows = embedding.shape[0]
        tokens = self._header.metadata.get(TOKENS)
        if isinstance(tokens, list) and len(tokens) > rows:
            refuse(f"{self._header.path} has {len(tokens):,} tokens and an embedding of {rows:,}")
        return rows

    def _head_dim(self, config: Mapping[str, Any]) -> int | None:
        heads = config["num_attention_heads"]
        if not heads or (config["hidden_size"] % heads and "head_dim" not in config):
            refuse(f"{self._header.path} divides {config['hidden_size']} by {heads} heads")
        return int(config.get("head_dim", config["hidden_size"] // heads))

    def _layer_types(self, config: dict[str, Any]) -> None:
        num_layers = config["num_hidden_layers"]
        pattern = self._get(WINDOWS)
        if self._name == "lfm2":
            types = ("conv", "full_attention")
            pattern = self._get(KV_HEADS)
        else:
            types = ("full_attention", "sliding_attention")
            if not config.get("sliding_window"):
                pattern = [False] * num_layers if self._name == "exaone4" else None
        if not isinstance(pattern, list):
            return
        if len(pattern) != num_layers:
            refuse(f"{self._header.path} lists {len(pattern)} layers of {num_layers}")
        config["layer_types"] = [types[bool(each)] for each in pattern]

    def _gemma(self, config: dict[str, Any]) -> None:
        if self._name in GEMMA_PARTS:
            is_largest = config["num_hidden_layers"] == GEMMA_PARTS[self._name]
            share = config["hidden_size"] // config["num_attention_heads"]
            config["query_pre_attn_scalar"] = share if is_largest else config["head_dim"]

    def _phi3(self, config: dict[str, Any]) -> None:
        if not 0 < config.get("sliding_window", 0) < config["max_position_embeddings"]:
            config["sliding_window"] = None
        original = self._get("rope.scaling.original_context_length")
        config["original_max_position_embeddings"] = original or config["max_position_embeddings"]

    def _rope(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, TensorPlace],
        architecture: Architecture,
    ) -> dict[str, Any]:
        theta = self._get("rope.freq_base")
        base: dict[str, Any] = {"rope_theta": _decimal(theta) if theta else USUAL_THETA}
        head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
        dimensions = self._get("rope.dimension_count") or head_dim
        if dimensions != head_dim:
            if not architecture.is_partial or not 0 < dimensions < head_dim:
                refuse(f"{self._header.path} has a rope of {dimensions} dimensions of {head_dim}")
            base["partial_rotary_factor"] = dimensions / head_dim
        elif architecture.is_partial:
            base["partial_rotary_factor"] = 1.0
        rope = base | self._scaling(config, tensors, dimensions // 2)
        if self._name == "mistral3":
            rope |= self._late_scale(config, rope)
        if self._name != "gemma3":
            return rope
        local: dict[str, Any] = {"rope_type": "default", "rope_theta": USUAL_THETA}
        return {"sliding_attention": local, "full_attention": rope}

    def _late_scale(
        self, config: Mapping[str, Any], rope: Mapping[str, Any]
    ) -> dict[str, float | int]:
        """Returns how queries are scaled beyond the original positions, and how YaRN scales all."""
        length = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
        found = {
            "llama_4_scaling_beta": _decimal(self._get(TEMPERATURE) or 0.0),
            "original_max_position_embeddings": length,
        }
        multiplier = self._get("rope.scaling.yarn_log_multiplier")
        if multiplier:
            found |= {"mscale": 1.0, "mscale_all_dim": _decimal(multiplier)}
        return found

    def _scaling(
        self, config: Mapping[str, Any], tensors: Mapping[str, TensorPlace], num_factors: int
    ) -> dict[str, Any]:
        names = ("rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight")
        long, short, both = (self._factors(tensors.get(name), num_factors) for name in names)
        original = self._get("rope.scaling.original_context_length")
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
            attention = self._get("rope.scaling.attn_factor")
            return {
                "rope_type": "longrope",
                "long_factor": long,
                "short_factor": short,
                "original_max_position_embeddings": original or config["max_position_embeddings"],
                **({} if attention is None else {"attention_factor": _decimal(attention)}),
            }
        # Files of 2023 have the factor of a linear scaling alone.
        kind = self._get("rope.scaling.type") or "linear"
        keys = ("rope.scaling.factor", "rope.scale_linear")
        factor = next((self._number(key, each) for key in keys if (each := self._get(key))), 0)
        if kind == "none" or not factor or (kind == "linear" and factor == 1):
            return {"rope_type": "default"}
        if kind not in ("linear", "yarn"):
            refuse(
                f"{self._header.path} has rope.scaling.type {str(kind)[:80]!r}; "
                "read are linear, yarn and factors",
                "Give the model in safetensors",
            )
        scaling = {"rope_type": kind, "factor": float(factor)}
        if kind == "linear":
            return scaling
        length = original or config["max_position_embeddings"]
        return scaling | {"original_max_position_embeddings": length} | self._yarn(float(factor))

    def _yarn(self, factor: float) -> dict[str, int | float]:
        """Returns YaRN's optional parameters. Raises Invalid where it scales attention otherwise
        than by its factor."""
        usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        for key in ("rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"):
            stated = self._get(key)
            scale = 1.0 if stated is None else self._number(key, stated)
            if not any(math.isclose(scale, each, rel_tol=1e-5) for each in (1.0, usual)):
                refuse(
                    f"{self._header.path} has {self._name}.{key} {scale}; "
                    f"read are 1 and YaRN's own {usual:.6g}",
                    "Give the model in safetensors",
                )
        values = {each: self._get(f"rope.scaling.yarn_{each}") for each in BETAS}
        return {
            beta: self._number(f"rope.scaling.yarn_{beta}", value)
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
        return [_decimal(each[0]) for each in SINGLE.iter_unpack(content)]


def _decimal(value: float) -> float:
    """Returns the shortest decimal that single precision rounds to this value, as in the model's
    own config."""
    for digits in range(6, 9):
        short = float(f"{value:.{digits}g}")
        if SINGLE.pack(short) == SINGLE.pack(value):
            return short
    return float(value)
