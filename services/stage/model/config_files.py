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
    return isinstance(part, dict) and name.endswith("_config") and name != "quantization_config"


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
    scopes = (config, text_config(config))
    found = next(
        filter(None, (getattr(each, "quantization_config", None) for each in scopes)), None
    )
    if found is None:
        return None
    spec: dict[str, Any] = found if isinstance(found, dict) else found.to_dict()
    method = str(spec.get("quant_method")).lower()
    if method not in METHODS:
        refuse(f"it is quantized by {method}", REMEDY)
    if method == "gptq":
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
    if spec.get("transform_config"):
        refuse(
            "its quantization_config has a transform_config, and no transform is applied", REMEDY
        )
    name = _known("format", spec.get("format"), (*SCALED, "pack-quantized"))
    if name not in SCALED:
        return PackedIntegers()
    groups = [group.get("weights") or {} for group in (spec.get("config_groups") or {}).values()]
    return ScaledQuantization(
        next(
            (_block(group["block_structure"]) for group in groups if group.get("block_structure")),
            None,
        )
    )


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
    return (int(size[0]), int(size[1])) if size else None


def _known(name: str, value: Any, known: tuple[Any, ...]) -> Any:
    if value not in known:
        shown = " or ".join(map(str, known))
        refuse(f"its quantization_config has {name} {value!r}, not {shown}", REMEDY)
    return value
