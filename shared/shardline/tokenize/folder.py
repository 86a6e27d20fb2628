"""What a model's folder says about tokens, as a row of `models`. Reads text files only, never weights.

Knows no limits: what a model can take is the word of the head that serves it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardline.errors import Invalid

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def model_row(
    folder: Path,
    *,
    name: str,
    fingerprint: str,
    context_length: int,
    vocab_size: int,
    eos_ids: Sequence[int],
    revision: str | None = None,
) -> dict[str, Any]:
    """The fields of the model in `folder`, with its head's limits. Without tokenizer.json it takes token ids only.
    Raises Invalid."""
    tokenizer_config = _read(folder / "tokenizer_config.json")
    return {
        "name": name,
        "revision": revision,
        "fingerprint": fingerprint,
        "context_length": context_length,
        "vocab_size": vocab_size,
        "eos_token_ids": list(eos_ids),
        "tokenizer": _text(folder / "tokenizer.json") or "",
        "chat_template": _chat_template(folder, tokenizer_config),
        "special_tokens": _special_tokens({**_read(folder / "special_tokens_map.json"), **tokenizer_config}),
    }


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The folder's chat template. As in transformers, a file of its own wins, and of several named ones `default`."""
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
