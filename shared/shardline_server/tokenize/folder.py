"""What a model's folder holds about tokens, as a row of `models`. Reads text files only, never
weights.

Knows no limits: what a model can take is the word of the head that serves it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from shardline.base.errors import Invalid
from shardline_server.replies import named

SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


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
    """The fields of the model in `folder`, with its head's limits. Without tokenizer.json it takes
    token ids only. Raises Invalid."""
    tokenizer_config = _read(folder / "tokenizer_config.json")
    return {
        "name": name,
        "revision": revision,
        "fingerprint": fingerprint,
        "context_length": context_length,
        "vocab_size": vocab_size,
        "eos_token_ids": list(eos_ids),
        "tokenizer": tokenizer_json(folder),
        "chat_template": _chat_template(folder, tokenizer_config),
        "special_tokens": _special_tokens(folder, tokenizer_config),
    }


def chosen_template(
    template: str | None, *, path: Path | None = None, reply_family: str | None = None
) -> str | None:
    """The chat template that settings choose: that of the file `path` instead of the model's, and
    as one of the named family. Raises Invalid."""
    if path is not None:
        try:
            template = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            remedy = "Set SHARDLINE_CHAT_TEMPLATE to a file of text that this process can read"
            raise Invalid("chat_template", f"{path} cannot be read: {error}", remedy) from error
    if reply_family is None:
        return template
    if template is None:
        problem = "the model has no chat template, so its replies are all text"
        raise Invalid("reply_family", problem, "Set SHARDLINE_CHAT_TEMPLATE too")
    return named(template, reply_family)


def tokenizers_eos_id(folder: Path) -> int | None:
    """The id of the token that ends a text, by the tokenizer's own files; None where they name
    none. Raises Invalid."""
    tokenizer_config = _read(folder / "tokenizer_config.json")
    eos = _special_tokens(folder, tokenizer_config).get("eos_token")
    text = tokenizer_json(folder)
    if eos is None or not text:
        return None
    document = _document(text, "tokenizer.json")
    added = {token["content"]: token["id"] for token in document.get("added_tokens") or ()}
    vocabulary = (document.get("model") or {}).get("vocab")
    found = added.get(eos, vocabulary.get(eos) if isinstance(vocabulary, dict) else None)
    return found if isinstance(found, int) else None


def tokenizer_json(folder: Path) -> str:
    """Returns the folder's tokenizer, with the tokens that its configuration alone adds, as
    transformers adds them; empty without one. Raises Invalid."""
    tokenizer_config = _read(folder / "tokenizer_config.json")
    text = _text(folder / "tokenizer.json") or ""
    listed = tokenizer_config.get("added_tokens_decoder")
    if not text or not listed:
        return text
    known = {
        token.get("content")
        for token in _document(text, "tokenizer.json").get("added_tokens") or ()
    }
    try:
        by_id = [token for _, token in sorted(listed.items(), key=lambda item: int(item[0]))]
        missing = [_added_token(token) for token in by_id if token["content"] not in known]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problem = f"added_tokens_decoder in tokenizer_config.json is malformed: {error!r}"
        raise Invalid("model", problem, "Copy the model again") from error
    if not missing:
        return text
    tokenizer = Tokenizer.from_str(text)
    tokenizer.add_tokens(missing)
    return str(tokenizer.to_str())


def tokenizer_from(text: str) -> Tokenizer:
    """Returns it without the padding and truncation that a file may ask for: they would change
    prompts silently. Of an empty text one that knows no token. Raises Invalid."""
    if not text:
        return Tokenizer(WordLevel({}, unk_token=""))
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:
        problem = f"tokenizer.json cannot be read: {error}"
        raise Invalid("tokenizer", problem, "Copy the model again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _added_token(token: Mapping[str, Any]) -> AddedToken:
    return AddedToken(
        token["content"], **{name: bool(token[name]) for name in TOKEN_FLAGS if name in token}
    )


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The folder's chat template. As in transformers, a separate file wins, and of several named
    ones `default`; older multimodal models have it in a file of their processor."""
    template = _text(folder / "chat_template.jinja") or tokenizer_config.get("chat_template")
    if template is None:
        template = _read(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    source = {**_read(folder / "special_tokens_map.json"), **tokenizer_config}
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
    return {} if text is None else _document(text, path.name)


def _document(text: str, name: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise Invalid("model", f"{name} is not JSON: {error}", "Copy the model again") from error
    if not isinstance(document, dict):
        raise Invalid("model", f"{name} is not a JSON object", "Copy the model again")
    return document
