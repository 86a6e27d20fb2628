"""Job ids: made by us, time-ordered, valid UUIDs. Knows no database."""

from __future__ import annotations

import secrets
import time
from uuid import UUID

from shardline.errors import Invalid

_VERSION_7 = 0x7 << 76
_VARIANT = 0x2 << 62


def new_id() -> UUID:
    """A UUIDv7: milliseconds since the epoch, then 74 random bits, so that ids sort by creation and index well."""
    milliseconds = time.time_ns() // 1_000_000
    random = secrets.randbits(74)
    return UUID(int=(milliseconds << 80) | _VERSION_7 | ((random >> 62) << 64) | _VARIANT | (random & ((1 << 62) - 1)))


def parse_id(text: str, field: str = "id") -> UUID:
    """The UUID that `text` spells. Raises Invalid, naming `field`."""
    try:
        return UUID(text)
    except ValueError as error:
        raise Invalid(field, f"{text[:64]!r} is not a UUID", "Send a UUID or leave it out to get one") from error
