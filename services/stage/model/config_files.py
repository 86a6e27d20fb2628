"""Reads config.json and generation_config.json of a model's folder, also how its weights are
quantized, and refuses by name values without a meaning.

Knows no rule by which a model can be sharded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from huggingface_hub.errors import StrictDataclassError

from services.stage.model.quantization import (
    BITS,
    REMEDY,
    Awq,
    Floats,
    Gptq,
    Mxfp4,
    PackedIntegers,
    Quantization,
    ScaledQuantization,
)
from services.stage.model.refusal import refuse
from services.stage.model.text_part import text_config
from services.stage.products.module_failures import FAILURES
from shardline_server.tokenize import tokenizers_eos_id

CONFIG = "config.json"
GENERATION = "generation_config.json"
REFUSALS = (*FAILURES, OSError, StrictDataclassError)
"""What transformers' classes of configs raise for values that they do not expect."""
RULES = (
    *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"),
    *("no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_eos_token_id"),
    *("min_length", "min_new_tokens", "stop_strings", "num_beams"),
)
"""Fields of generation_config.json by which transformers' `generate` forbids or forces tokens."""
DTYPES = ("torch_dtype", "dtype")
SIZE_NAMES = ("size", "head", "layers")
METHODS = ("awq", "compressed-tensors", "fp8", "gptq", "mxfp4")
SCALED = ("int-quantized", "naive-quantized", "float-quantized")
"""Formats of compressed-tensors."""
DENSE = "dense"
COMPRESSION = "compression_config"
"""As compressed-tensors named it in 2024."""
QUANTIZATION_NAMES = ("quantization_config", COMPRESSION)
MLX_FIELDS = frozenset({"bits", "group_size"})
"""What MLX's config has, without a method."""


def read_config(path: Path) -> Any:
    """Returns transformers' config of a model's folder. Raises Invalid."""
    file = path / CONFIG
    if not file.is_file():
        _refuse_without_config(path)
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        model_type = raw["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        refuse(f"{file} is not a model's config: {error!r}", "Copy the model again", error)
    if model_type not in tf.CONFIG_MAPPING:
        why = (
            "needs remote code, which is never run"
            if "auto_map" in raw
            else "is unknown to this transformers"
        )
        refuse(
            f"model type {model_type!r} {why} ({tf.__version__})",
            "Choose a model that transformers has built in",
        )
    try:
        config = tf.AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except REFUSALS as error:
        _refuse_fields(file, raw, error)
        refuse(f"transformers refuses {file}: {error}", "Correct the config", error)
    if config.model_type != model_type:
        _rename(config, model_type)
    return config


def _refuse_without_config(path: Path) -> None:
    remedy = "Give the folder of a transformers model"
    for inner in sorted(path.glob(f"0_*/{CONFIG}")):
        # Older versions of sentence-transformers save the layers so.
        remedy = f"In a copy of it, move the files of {inner.parent.name} up, next to modules.json"
    refuse(f"{path} has no {CONFIG}", remedy)


def _refuse_fields(file: Path, raw: Mapping[str, Any], error: Exception) -> None:
    """Raises Invalid for fields that transformers' error does not name."""
    fields = [item for part in _parts(raw) for item in part.items()]
    for name, value in fields:
        is_dtype = name in DTYPES and isinstance(value, str)
        if is_dtype and not isinstance(getattr(torch, value, None), torch.dtype):
            refuse(f"{file} has {name} {value!r}", "Write bfloat16, float16 or float32", error)
    if isinstance(error, ArithmeticError):
        for name, value in fields:
            if value == 0 and any(each in name for each in SIZE_NAMES):
                refuse(f"{file} has {name} {value!r}", "Write the model's own number", error)


def _parts(raw: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields a config, and those inside it."""
    yield raw
    yield from (part for name, part in raw.items() if _is_config(name, part))


def _is_config(name: str, part: object) -> bool:
    return isinstance(part, dict) and name.endswith("_config") and name not in QUANTIZATION_NAMES


def _rename(config: Any, model_type: str) -> None:
    """Names the class that transformers loads where it takes a config for another family's, as it
    takes Mistral's with `layer_types` for Ministral's."""
    mapping: Any = tf.MODEL_FOR_CAUSAL_LM_MAPPING
    saved, taken = (
        mapping.get(each, None) for each in (tf.CONFIG_MAPPING[model_type], type(config))
    )
    if isinstance(saved, type) and isinstance(taken, type) and config.architectures:
        names = {saved.__name__: taken.__name__}
        config.architectures = [names.get(each, each) for each in config.architectures]


def eos_ids(path: Path, config: Any) -> tuple[int, ...]:
    """Returns the end-of-sequence ids of generation_config.json, or of config.json if it has none,
    and the tokenizer's: fine-tunes often name it there alone. Raises Invalid."""
    named = getattr(config, "eos_token_id", None)
    stated = text_config(config).eos_token_id if named is None else named
    found = _ids(path / GENERATION, _generation(path).get("eos_token_id"))
    found = found or _ids(path / CONFIG, stated)
    own = tokenizers_eos_id(path)
    return tuple(dict.fromkeys((*found, *(() if own is None else (own,)))))


def ignored_rules(path: Path) -> list[str]:
    """Returns the fields of generation_config.json that change what transformers generates, and
    that no stage applies. Raises Invalid."""
    found = _generation(path)
    return [name for name in RULES if _is_rule(name, found.get(name))]


def _is_rule(name: str, value: object) -> bool:
    if name == "forced_eos_token_id":
        return value is not None  # 0 is a token
    return bool(value) and not (name == "num_beams" and value == 1)


def quantization_of(config: Any) -> Quantization | None:
    """Returns how a model's weights are quantized; None if they are not. Raises Invalid for what is
    not read here."""
    spec = _quantization_spec(config)
    if spec is None:
        return None
    method = str(spec.get("quant_method")).lower()
    if method == "none" and spec.keys() >= MLX_FIELDS:
        refuse("it is quantized by MLX", REMEDY)
    if method not in METHODS:
        refuse(f"it is quantized by {method}", REMEDY)
    if method == "gptq":
        if spec.get("is_marlin_format"):
            refuse("its quantization_config has is_marlin_format: its words are Marlin's", REMEDY)
        _known("bits", spec.get("bits"), BITS)
        is_second = spec.get("checkpoint_format") == "gptq_v2"
        _known("checkpoint_format", spec.get("checkpoint_format") or "gptq", ("gptq", "gptq_v2"))
        return Gptq(zeros_are_less=0 if is_second else 1)
    if method == "awq":
        _known("bits", spec.get("bits", spec.get("w_bit")), (4,))
        _known("version", str(spec.get("version") or "gemm").lower(), ("gemm",))
        return Awq()
    if method in ("fp8", "mxfp4"):
        is_fp8 = method == "fp8"
        return ScaledQuantization(_block(spec.get("weight_block_size"))) if is_fp8 else Mxfp4()
    return _compressed_tensors(spec)


def _quantization_spec(config: Any) -> dict[str, Any] | None:
    """Returns what a config, or that of its text, says of quantized weights."""
    for scope in (config, text_config(config)):
        for name in QUANTIZATION_NAMES:
            if found := getattr(scope, name, None):
                spec: dict[str, Any] = found if isinstance(found, dict) else found.to_dict()
                method = {"quant_method": "compressed-tensors"}
                return (method if name == COMPRESSION else {}) | spec
        found = getattr(scope, "quantization", None)
        if isinstance(found, dict) and found.keys() >= MLX_FIELDS:
            return found
    return None


def _compressed_tensors(spec: Mapping[str, Any]) -> Quantization:
    if spec.get("transform_config"):
        refuse(
            "its quantization_config has a transform_config, and no transform is applied", REMEDY
        )
    sparsity = (spec.get("sparsity_config") or {}).get("format") or DENSE
    if sparsity != DENSE:
        refuse(f"its sparsity_config has format {sparsity!r}, not {DENSE}", REMEDY)
    groups = (spec.get("config_groups") or {}).values()
    if spec.get("format") == DENSE and not groups:
        return Floats()
    name = _known("format", spec.get("format"), (*SCALED, "pack-quantized"))
    if name not in SCALED:
        return PackedIntegers()
    weights = [group.get("weights") or {} for group in groups]
    blocks = (each.get("block_structure") for each in weights)
    return ScaledQuantization(_block(next(filter(None, blocks), None)))


def _ids(file: Path, eos: Any) -> list[int]:
    """Returns the ids that a file states; negative ones, as llama.cpp writes them, mean none."""
    found = list(eos) if isinstance(eos, list | tuple) else [eos]
    if not all(one is None or type(one) is int for one in found):
        refuse(f"{file} has eos_token_id {eos!r}", "Write a number or a list of numbers")
    return [one for one in found if one is not None and one >= 0]


def _generation(path: Path) -> dict[str, Any]:
    """Returns it as it is: transformers refuses a generation config for settings that are not read
    here."""
    file = path / GENERATION
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        refuse(f"{file} cannot be read: {error}", "Correct it, or remove it", error)
    if not isinstance(found, dict):
        refuse(f"{file} is no JSON object", "Correct it, or remove it")
    return found


def _block(size: Any) -> tuple[int, int] | None:
    if not size:
        return None
    try:
        rows, columns = size.split("x") if isinstance(size, str) else size
        return int(rows), int(columns)
    except (TypeError, ValueError) as error:
        problem = f"its quantization_config has blocks of {size!r}, not rows and columns"
        refuse(problem, REMEDY, error)


def _known(name: str, value: Any, known: tuple[Any, ...]) -> Any:
    if value not in known:
        shown = " or ".join(map(str, known))
        refuse(f"its quantization_config has {name} {value!r}, not {shown}", REMEDY)
    return value
