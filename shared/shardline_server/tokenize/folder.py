"""What a model's folder holds about tokens, as a row of `models`. Reads text files only, never
weights.

Knows no limits: what a model can take is the word of the head that serves it.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from shardline.base.errors import Invalid
from shardline_server.replies import named
from shardline_server.tokenize.chat import BY_TOOLS

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
        "tokenizer": tokenizer_json(folder, vocab_size=vocab_size),
        "chat_template": _chat_template(folder, tokenizer_config),
        "special_tokens": _special_tokens(folder),
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
    eos = _special_tokens(folder).get("eos_token")
    # Without the tokens that only a name adds: no model was trained to end with those.
    text = tokenizer_json(folder, vocab_size=0)
    if eos is None or not text:
        return None
    document = _document(text, "tokenizer.json")
    added = {token["content"]: token["id"] for token in document.get("added_tokens") or ()}
    vocabulary = (document.get("model") or {}).get("vocab")
    found = added.get(eos, vocabulary.get(eos) if isinstance(vocabulary, dict) else None)
    return found if isinstance(found, int) else None


def tokenizer_json(folder: Path, *, vocab_size: int) -> str:
    """Returns the folder's tokenizer, with the tokens that its other files add or mark, as
    transformers adds them; empty without one. Raises Invalid.

    Tokens that are named without an id stay text where the model's vocabulary has no place left.
    """
    text = _text(folder / "tokenizer.json") or ""
    if not text:
        return text
    own = _document(text, "tokenizer.json").get("added_tokens") or ()
    known = {token.get("content"): token for token in own}
    by_name, extra = _named_tokens(folder)
    names = {token["content"] for token in by_name.values()}
    listed = _listed_tokens(folder, own, names.union(token["content"] for token in extra))
    found = {*known, *(token["content"] for token in listed)}
    changed = [
        _added_token(token)
        for token in (_marked(token, names, known.get(token["content"], {})) for token in listed)
        if not _is_as(token, known.get(token["content"]))
    ]
    missing: dict[str, AddedToken] = {}
    for token in (*by_name.values(), *extra):
        if token["content"] not in found:
            missing.setdefault(token["content"], _added_token(_marked(token, names, {})))
    if not changed and not missing:
        return text
    return _with_tokens(text, changed, missing, vocab_size)


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


def _with_tokens(
    text: str, changed: list[AddedToken], missing: Mapping[str, AddedToken], vocab_size: int
) -> str:
    tokenizer = tokenizer_from(text)
    tokenizer.add_tokens(changed)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    num_free = max(0, vocab_size - 1 - max(ids.values(), default=-1))
    beyond = [content for content in missing if content not in ids][num_free:]
    tokenizer.add_tokens([token for content, token in missing.items() if content not in beyond])
    return str(tokenizer.to_str())


def _named_tokens(folder: Path) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """The tokens that the folder's files name, and the special ones without a name. As in
    transformers, special_tokens_map.json wins, and is not read if there is added_tokens_decoder."""
    documents = [_read(folder / "tokenizer_config.json")]
    if documents[0].get("added_tokens_decoder") is None:
        documents.append(_read(folder / "special_tokens_map.json"))
    by_name: dict[str, Any] = dict.fromkeys(SPECIAL_TOKENS)
    extra: list[Any] = []
    for document in documents:
        by_name |= {name: token for name, token in document.items() if name.endswith("_token")}
        own = document.get("extra_special_tokens")
        if isinstance(own, dict):
            by_name |= own
        elif isinstance(own, list):
            extra += own
        additional = document.get("additional_special_tokens")
        if not extra and isinstance(additional, list):
            extra += additional
    as_tokens = {name: _special_token(token) for name, token in by_name.items()}
    return (
        {name: token for name, token in as_tokens.items() if token is not None},
        [token for token in map(_special_token, extra) if token is not None],
    )


def _special_token(token: Any) -> dict[str, Any] | None:
    """Returns a token, special by default, from its text or its fields; None: it is none."""
    fields = {"content": token} if isinstance(token, str) else token
    if not isinstance(fields, dict) or not isinstance(fields.get("content"), str):
        return None
    return {"special": True, **fields}


def _listed_tokens(
    folder: Path, own: Sequence[Mapping[str, Any]], special: Container[str]
) -> list[Mapping[str, Any]]:
    """The tokens that have an id, by id: those of added_tokens_decoder, or else those of
    added_tokens.json and `own` of tokenizer.json."""
    listed = _read(folder / "tokenizer_config.json").get("added_tokens_decoder")
    source = "added_tokens_decoder in tokenizer_config.json"
    try:
        if listed is not None:
            by_id = {int(number): token for number, token in listed.items()}
        else:
            source = "added_tokens.json"
            known = {token["content"] for token in own}
            by_id = {
                int(number): {"content": text, "special": text in special}
                for text, number in _read(folder / source).items()
                if text not in known
            }
            by_id |= {token["id"]: token for token in own}
        return [{**token, "content": token["content"]} for _, token in sorted(by_id.items())]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Invalid(
            "model", f"{source} is malformed: {error!r}", "Copy the model again"
        ) from error


def _marked(
    token: Mapping[str, Any], names: Container[str], known: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The token as special where it has a name or was special: none becomes ordinary again."""
    is_special = token["content"] in names or known.get("special")
    return {**token, "special": True} if is_special else token


def _is_as(token: Mapping[str, Any], known: Mapping[str, Any] | None) -> bool:
    made = _added_token(token)
    return known is not None and all(
        bool(known.get(flag)) == getattr(made, flag) for flag in TOKEN_FLAGS
    )


def _added_token(token: Mapping[str, Any]) -> AddedToken:
    return AddedToken(
        token["content"], **{name: bool(token[name]) for name in TOKEN_FLAGS if name in token}
    )


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The folder's chat template. As in transformers, separate files win, and of several named
    ones `default`, or with tools `tool_use`; older multimodal models have it in a file of their
    processor."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in folder.glob("additional_chat_templates/*.jinja")}
    texts = {name: text for name, path in files.items() if (text := _text(path))}
    template = texts or tokenizer_config.get("chat_template")
    if template is None:
        template = _read(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        if not all(isinstance(entry, dict) for entry in template):
            problem = "chat_template in the model's files is a list of other than named templates"
            raise Invalid("model", problem, "Write a text, or objects of a name and a template")
        template = {entry.get("name"): entry.get("template") for entry in template}
    if isinstance(template, dict):
        usual, with_tools = template.get("default"), template.get("tool_use")
        both = isinstance(usual, str) and isinstance(with_tools, str)
        template = _by_tools(str(usual), str(with_tools)) if both else usual
    return template if isinstance(template, str) else None


def _by_tools(usual: str, with_tools: str) -> str:
    """One template of both. The signs keep their spaces; the newline that ends a template is no
    part of it."""
    first, second = (text.removesuffix("\n") for text in (with_tools, usual))
    return f"{BY_TOOLS}{first}{{%+ else +%}}{second}{{%+ endif %}}"


def _special_tokens(folder: Path) -> dict[str, str]:
    """The texts of named tokens by name, as templates use them."""
    return {name: token["content"] for name, token in _named_tokens(folder)[0].items()}


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except UnicodeDecodeError as error:
        raise Invalid("model", f"{path.name} is not UTF-8: {error}", "Save it as UTF-8") from error


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
