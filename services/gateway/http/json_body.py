"""Bodies in JSON: what they become in memory, and what is wrong with their encoding. Knows no field
of a job."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from shardline.base.errors import Invalid
from shardline.contract.tool_choice import MAX_TOOLS_BYTES
from shardline.store.connection.encoding import place_of_unstorable, unstorable

Document = dict[str, Any]

MAX_FIELD_BYTES = 64 << 10
"""Of each field that LARGE_FIELDS and `tools` are not: refused before it is decoded."""

LARGE_FIELDS = frozenset(
    {
        *("prompt", "messages", "system", "tokens", "input", "instructions", "questions"),
        *("document", "documents", "query", "text_1", "text_2"),
    }
)
"""Bounded by the body's limit alone."""

OBJECT_BYTES: Mapping[bytes, int] = {b"{": 64, b"[": 96, b":": 168, b",": 64}
"""What the value behind each of these costs at most as a Python object (CPython 3.11 to 3.13)."""

MAX_SEARCHED_BYTES = 1 << 20
"""Of a body that is searched for the field that it is refused for."""

GZIP = b"\x1f\x8b"


def check_fields(body: bytes) -> None:
    """Raises Invalid for a field over its limit. Decodes nothing, and leaves what is no JSON to
    `read_object`."""
    if len(body) <= MAX_FIELD_BYTES:
        return
    for name, value in _fields(body).items():
        max_bytes = MAX_TOOLS_BYTES if name == "tools" else MAX_FIELD_BYTES
        if name not in LARGE_FIELDS and len(bytes(value)) > max_bytes:
            problem = f"it is over {max_bytes} bytes of JSON"
            raise Invalid(name[:64], problem, "Send less, or keep it elsewhere and send its name")


def decoded_bytes(body: bytes) -> int:
    """About how much memory the body takes once it is decoded, and not less than it does. A body of
    `{},{},…` takes 25 times its bytes; text takes its own, and four times as much if a single
    character of it is an emoji."""
    if len(body) <= MAX_FIELD_BYTES:
        return _value_bytes(body)
    return sum(_value_bytes(bytes(value)) for value in _fields(body).values())


def read_object(body: bytes) -> Document:
    """The JSON object in a body, which may begin with a byte order mark. Raises Invalid."""
    body = body.removeprefix(codecs.BOM_UTF8)
    try:
        return msgspec.json.decode(body, type=Document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _what_is_wrong(body, error) from error


def _fields(body: bytes) -> dict[str, msgspec.Raw]:
    """The fields as they came; none of what is no object."""
    try:
        return msgspec.json.decode(body.removeprefix(codecs.BOM_UTF8), type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


def _value_bytes(value: bytes) -> int:
    text_bytes = len(value) * (1 if value.isascii() else 4)
    if value.startswith(b'"'):
        return text_bytes
    return text_bytes + sum(
        value.count(sign) * num_bytes for sign, num_bytes in OBJECT_BYTES.items()
    )


def _what_is_wrong(body: bytes, error: Exception) -> Invalid:
    if body.startswith(GZIP):
        return Invalid("body", "it is packed with gzip", "Send one JSON object in UTF-8, unpacked")
    encoding = json.detect_encoding(body[:4])
    if not encoding.startswith("utf-8"):
        return Invalid("body", f"it is in {encoding[:6].upper()}", "Send one JSON object in UTF-8")
    found = _place_and_problem(body) if len(body) <= MAX_SEARCHED_BYTES else None
    if found is not None:
        return Invalid(*found, "Change it: JSON and UTF-8 have no such thing")
    return Invalid("body", f"it is not a JSON object: {error}", "Send one JSON object in UTF-8")


def _place_and_problem(body: bytes) -> tuple[str, str] | None:
    """Finds where it holds what msgspec refuses and Python's own decoder takes: half of a
    character, as texts cut by their length have it, or a number without bounds."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None
    problem = unstorable(document) if isinstance(document, dict) else None
    if problem is None:
        return None
    return place_of_unstorable(document).removeprefix(".") or "body", problem
