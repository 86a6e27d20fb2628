"""JSON of what callers pass as values: their texts may be of subclasses of str."""

from __future__ import annotations

from typing import Any

import msgspec


def encode_json(document: object) -> bytes:
    """Encodes as UTF-8. Raises TypeError for what JSON does not know, UnicodeEncodeError for a lone
    surrogate."""
    return msgspec.json.encode(document, enc_hook=_text)


def builtins(document: object) -> Any:
    """Returns dicts, lists and values of Python. Raises TypeError for what JSON does not know."""
    return msgspec.to_builtins(document, enc_hook=_text)


def _text(value: object) -> str:
    """The text of an instance of a subclass of str, such as Django's SafeString or numpy's str_."""
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(f"{type(value).__name__} is nothing that JSON knows")
