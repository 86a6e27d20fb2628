"""JSON of Celery's messages, read without trust in what it holds. Knows no message.

kombu (5.7) writes times, UUIDs and the like as `{"__type__": …, "__value__": …}`, and refuses the
whole message over a value of that form which it did not write: a caller's own data may look so.
"""

from __future__ import annotations

from typing import Any

from kombu.serialization import register
from kombu.utils import json as kombu_json


def loads(document: Any) -> Any:
    """Reads as kombu does, but what only looks like a value of kombu's stays an object."""
    return kombu_json.loads(document, object_hook=_object)


def read_plainly() -> None:
    """Makes this process read all of Celery's JSON so from now on."""
    register(
        "json", kombu_json.dumps, loads, content_type="application/json", content_encoding="utf-8"
    )


def _object(found: dict[str, Any]) -> Any:
    try:
        return kombu_json.object_hook(found)
    except Exception:  # noqa: BLE001 (a decoder of kombu's gets whatever a caller sent)
        return found
