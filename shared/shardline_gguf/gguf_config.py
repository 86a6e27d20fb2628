"""The config of transformers that a GGUF file's metadata mean. Reads no weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from shardline_gguf.architecture import Architecture
from shardline_gguf.architectures import ARCHITECTURES, WINDOWED
from shardline_gguf.gguf_files import is_gguf, model_in, read_parts
from shardline_gguf.gguf_header import IN_4_BITS, GgufHeader, TensorPlace
from shardline_gguf.gguf_rope import rope_of
from shardline_gguf.later_architectures import MIXTRAL
from shardline_gguf.metadata import Metadata
from shardline_gguf.refusal import refuse

CONFIG = "config.json"
FORMAT = 4
"""Raised when a file comes to mean other weights or texts: fingerprints differ then."""
TOKENS = "tokenizer.ggml.tokens"
TOKEN_TYPES = "tokenizer.ggml.token_type"  # noqa: S105 (a key of metadata)
CONTROL = 3
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
ENDS_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>")
"""Control tokens that end a reply: a header names one, a model's generation config all."""
END_OF_PART = "<|end|>"
ENDS_OF_HARMONY = ("<|return|>", "<|call|>")
"""Where these end a reply, the other ends a part of it, such as what the model thinks."""
MAX_LAYERS = 4096
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
    found = _file_of(model, config)
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


def has_mxfp4_experts(model: Path, config: Mapping[str, Any]) -> bool:
    """Whether a model is a GGUF file whose experts keep the scales of MXFP4 in int8. Raises Invalid
    for a file that cannot be read."""
    found = _file_of(model, config) if config.get("model_type") == "gpt_oss" else None
    if found is None:
        return False
    places = read_parts(found)[1].values()
    return any(len(each.shape) == 3 and each.block.name == "MXFP4" for each in places)


def _file_of(model: Path, config: Mapping[str, Any]) -> Path | None:
    return model if is_gguf(model) else model_in(model) if "gguf_format" in config else None


def config_of(header: GgufHeader, tensors: Mapping[str, TensorPlace]) -> dict[str, Any]:
    """Returns the config of a model by its header and the tensors of all its parts. Raises Invalid
    for an architecture that is not read, or a size that is missing."""
    name = header.architecture
    has_window = f"{name}.{WINDOW}" in header.metadata
    architecture = WINDOWED.get(name) if has_window else None
    if name == "llama" and header.metadata.get("llama.expert_count"):
        architecture = MIXTRAL
    architecture = architecture or ARCHITECTURES.get(name)
    if architecture is None:
        known = ", ".join(sorted(ARCHITECTURES))
        refuse(
            f"{header.path} is of the architecture {name[:80]!r}; GGUF files are read of {known}",
            "Give the model in safetensors",
        )
    config = _Config(header, name).config(architecture, tensors)
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
    ends = set(ENDS_OF_TURN)
    if set(ENDS_OF_HARMONY).issubset(tokens):
        ends = ends.difference((END_OF_PART,)).union(ENDS_OF_HARMONY)
    known = [
        number
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == CONTROL and token in ends
    ]
    return tuple(dict.fromkeys(one for one in (*named, *known) if one is not None))


def drafting_layers(header: GgufHeader) -> int:
    """Returns how many layers behind the model's own only draft tokens ahead."""
    found = header.metadata.get(f"{header.architecture}.nextn_predict_layers", 0)
    return found if type(found) is int and 0 <= found <= MAX_LAYERS else 0


def _token_id(header: GgufHeader, key: str) -> int | None:
    found = header.metadata.get(f"tokenizer.ggml.{key}")
    tokens = header.metadata.get(TOKENS) or []
    # -1, and as unsigned its like, stands for no token.
    return found if type(found) is int and 0 <= found < len(tokens) else None


class _Config:
    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self._metadata = Metadata(header, architecture)
        self._header = header
        self._name = architecture

    def config(
        self, architecture: Architecture, tensors: Mapping[str, TensorPlace]
    ) -> dict[str, Any]:
        config: dict[str, Any] = dict(architecture.fixed)
        for key, field in architecture.sizes.items():
            value = self._metadata.get(key)
            if value is not None:
                skips_zeros = bool(architecture.kinds)
                config[field] = self._metadata.number(key, value, skips_zeros=skips_zeros)
            elif key not in architecture.optional:
                refuse(f"{self._header.path} has no {self._name}.{key}")
        config["num_hidden_layers"] -= drafting_layers(self._header)
        if not 1 <= config["num_hidden_layers"] <= MAX_LAYERS:
            refuse(f"{self._header.path} would have {config['num_hidden_layers']:,} layers")
        if self._metadata.get("expert_count") and "expert_count" not in architecture.sizes:
            refuse(
                f"{self._header.path} is of the architecture {self._name!r} with experts, "
                "which is not read",
                "Give the model in safetensors",
            )
        if architecture.constants is not None:
            self._metadata.check_others(architecture)
        config |= {field: f"blk.0.{end}" in tensors for field, end in architecture.biases.items()}
        config["vocab_size"] = self._vocab_size(tensors)
        head_dim = self._head_dim(config)
        if "attention.key_length" in architecture.sizes:
            config["head_dim"] = head_dim
        elif self._metadata.get("attention.key_length") not in (None, head_dim):
            refuse(f"{self._header.path} has heads of another size than {head_dim}")
        if any(self._metadata.get("rope.dimension_sections") or ()) and not architecture.has_axes:
            refuse(f"{self._header.path} has rotations of several axes, which are not read")
        config |= self._layer_types(config, architecture, tensors) | self._shares(
            config, architecture
        )
        self._gemma(config)
        if self._name == "phi3":
            self._phi3(config)
        if architecture.fields is not None:
            config |= architecture.fields(self._metadata, config, tensors)
        if "rope_parameters" not in config:
            config["rope_parameters"] = rope_of(self._metadata, architecture, config, tensors)
        return config

    def _vocab_size(self, tensors: Mapping[str, TensorPlace]) -> int:
        embedding = tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            refuse(f"{self._header.path} has no token_embd.weight")
        rows = embedding.shape[0]
        tokens = self._header.metadata.get(TOKENS)
        if isinstance(tokens, list) and len(tokens) > rows:
            refuse(f"{self._header.path} has {len(tokens):,} tokens and an embedding of {rows:,}")
        return rows

    def _head_dim(self, config: Mapping[str, Any]) -> int:
        heads = config["num_attention_heads"]
        if not heads or (config["hidden_size"] % heads and "head_dim" not in config):
            refuse(f"{self._header.path} divides {config['hidden_size']} by {heads} heads")
        return int(config.get("head_dim", config["hidden_size"] // heads))

    def _layer_types(
        self,
        config: Mapping[str, Any],
        architecture: Architecture,
        tensors: Mapping[str, TensorPlace],
    ) -> dict[str, Any]:
        num_layers = config["num_hidden_layers"]
        if architecture.kinds:
            return {
                "layer_types": [self._kind(n, architecture, tensors) for n in range(num_layers)]
            }
        pattern = self._metadata.get(WINDOWS)
        if not config.get("sliding_window"):
            pattern = [False] * num_layers if self._name == "exaone4" else None
        if not isinstance(pattern, list):
            return {}
        if len(pattern) != num_layers:
            refuse(f"{self._header.path} lists {len(pattern)} layers of {num_layers}")
        types = ("full_attention", "sliding_attention")
        return {"layer_types": [types[bool(each)] for each in pattern]}

    def _kind(
        self, number: int, architecture: Architecture, tensors: Mapping[str, TensorPlace]
    ) -> str:
        ends = [end for end in architecture.kinds if f"blk.{number}.{end}" in tensors]
        if not ends:
            known = ", ".join(architecture.kinds)
            refuse(f"layer {number} of {self._header.path} has none of {known}")
        return architecture.kinds[ends[0]]

    def _shares(self, config: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
        """Returns the factors of sizes that are products."""
        found: dict[str, Any] = {}
        for key, (field, other) in architecture.shares.items():
            product, factor = self._metadata.get(key), config[other]
            if type(product) is not int or not factor or product % factor:
                refuse(f"{self._header.path} has {self._name}.{key} {product}, no {factor} times")
            found[field] = product // factor
        return found

    def _gemma(self, config: dict[str, Any]) -> None:
        if self._name in GEMMA_PARTS:
            is_largest = config["num_hidden_layers"] == GEMMA_PARTS[self._name]
            share = config["hidden_size"] // config["num_attention_heads"]
            config["query_pre_attn_scalar"] = share if is_largest else config["head_dim"]

    def _phi3(self, config: dict[str, Any]) -> None:
        if not 0 < config.get("sliding_window", 0) < config["max_position_embeddings"]:
            config["sliding_window"] = None
        original = self._metadata.get("rope.scaling.original_context_length")
        config["original_max_position_embeddings"] = original or config["max_position_embeddings"]
