"""What a model's folder says about tokens, as a row of `models`. Reads text files only, never weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardline.errors import Invalid

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def model_row(folder: Path, *, name: str, fingerprint: str, revision: str | None = None) -> dict[str, Any]:
    """The fields of the model in `folder`. Without tokenizer.json it takes token ids only. Raises Invalid."""
    config = _read(folder / "config.json")
    text_config = config.get("text_config") or config
    tokenizer_config = _read(folder / "tokenizer_config.json")
    return {
        "name": name,
        "revision": revision,
        "fingerprint": fingerprint,
        "context_length": _context_length(text_config),
        "vocab_size": _number(text_config, "vocab_size"),
        "eos_token_ids": _eos_ids(_read(folder / "generation_config.json"), text_config),
        "tokenizer": _text(folder / "tokenizer.json") or "",
        "chat_template": _chat_template(folder, tokenizer_config),
        "special_tokens": _special_tokens({**_read(folder / "special_tokens_map.json"), **tokenizer_config}),
    }


def _eos_ids(generation: Mapping[str, Any], config: Mapping[str, Any]) -> list[int]:
    """generation_config.json is the word on end of sequence; config.json where that says nothing."""
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = config.get("eos_token_id")
    if eos is None:
        return []
    return [int(token_id) for token_id in (eos if isinstance(eos, list) else [eos])]


def _context_length(config: Mapping[str, Any]) -> int:
    """Rope variants that rescale with the longest sequence of a batch are held in the range where they do not."""
    length = _number(config, "max_position_embeddings")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    layered = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    originals = [
        int(part["original_max_position_embeddings"])
        for part in layered
        if part.get("rope_type") in ("longrope", "dynamic") and part.get("original_max_position_embeddings")
    ]
    return min([length, *originals])


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The file of its own wins, as in transformers; of several named ones `default` is meant."""
    template = _text(folder / "chat_template.jinja") or tokenizer_config.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(source: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in SPECIAL_TOKENS:
        token = source.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found


def _number(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise Invalid("model", f"config.json has no usable {name}", "Give the folder of a causal LM")
    return value


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _read(path: Path) -> dict[str, Any]:
    text = _text(path)
    if text is None:
        return {}
    try:
        document = json.loads(text)
    except ValueError as error:
        raise Invalid("model", f"{path.name} is not JSON: {error}", "Copy the model again") from error
    if not isinstance(document, dict):
        raise Invalid("model", f"{path.name} is not a JSON object", "Copy the model again")
    return document
