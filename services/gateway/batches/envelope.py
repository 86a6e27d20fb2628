"""What a line of a batch's file has around its request. Knows no request."""

from __future__ import annotations

import codecs
from typing import Any

import msgspec

from services.gateway.batches.input_lines import InputLine
from services.gateway.errors import TooLarge
from shardline.base.errors import Invalid
from shardline.contract.batches.batch_tables import MAX_CUSTOM_ID_CHARS
from shardline.contract.request_parsing import shown
from shardline.store.connection.encoding import unstorable

FIELDS = ("custom_id", "method", "url", "body")
POST = "POST"


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a line that a batch reads. `error`: why the line cannot be a request."""

    custom_id: str | None = None
    url: str | None = None
    body: bytes = b""
    error: Invalid | None = None
    is_json: bool = True


def read_envelope(line: InputLine, *, max_bytes: int) -> Envelope:
    """Reads a line. Raises nothing: what is wrong is the line's own error."""
    if line.data is None:
        problem = f"line {line.number} is over {max_bytes} bytes"
        remedy = "Send shorter prompts or several requests"
        return Envelope(error=TooLarge("body", problem, remedy))
    try:
        data = line.data.removeprefix(codecs.BOM_UTF8)
        raw = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        problem = f"line {line.number} is not a JSON object: {str(error)[:128]}"
        invalid = Invalid("line", problem, "Send one JSON object in each line")
        return Envelope(error=invalid, is_json=False)
    custom_id = _text(raw, "custom_id")
    url = _text(raw, "url")
    try:
        _check(raw, custom_id, line.number)
    except Invalid as error:
        is_storable = custom_id is not None and _is_storable(custom_id)
        return Envelope(custom_id=custom_id if is_storable else None, url=url, error=error)
    return Envelope(custom_id=custom_id, url=url, body=bytes(raw["body"]))


def _check(raw: dict[str, msgspec.Raw], custom_id: str | None, number: int) -> None:
    where = f"in line {number}"
    for name in raw:
        if name not in FIELDS:
            remedy = f"Use {', '.join(FIELDS)}"
            raise Invalid(shown(name), f"there is no such field {where}", remedy)
    for name in FIELDS:
        if name not in raw:
            raise Invalid(name, f"it is missing {where}", "Send it in each line")
    if custom_id is None or not _is_storable(custom_id):
        problem = f"it is no text of 1 to {MAX_CUSTOM_ID_CHARS} characters {where}"
        raise Invalid("custom_id", problem, "Send another one")
    if _text(raw, "method") != POST:
        raise Invalid("method", f"it is not POST {where}", "Send POST")


def _is_storable(custom_id: str) -> bool:
    return 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS and unstorable(custom_id) is None


def _text(raw: dict[str, msgspec.Raw], name: str) -> str | None:
    try:
        found: Any = msgspec.json.decode(raw.get(name, b"null"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found if isinstance(found, str) else None
