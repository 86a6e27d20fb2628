"""Job ids: made by us, time-ordered or from a name, valid UUIDs, or given by a caller as text.
Knows no database."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterable
from typing import TypeAlias
from uuid import UUID, uuid5

from typing_extensions import TypeIs

from shardline.base.errors import Invalid

JobId: TypeAlias = UUID | str
"""What a caller may pass: ids that went through JSON, a session or a file are text."""

DERIVED_VERSION = 8
"""Of the UUIDs that follow from a name which others may know. No caller may name one, or it could
take the id of another's job."""

_FORMER_IDS = UUID("6f0f0c1e-53a5-4f43-9c0b-7a8f0f2d4b11")
_VERSION_7 = 0x7 << 76
_VERSION_8 = 0x8 << 76
_VERSION_BITS = 0xF << 76
_VARIANT = 0x2 << 62
_VARIANT_BITS = 0x3 << 62
_PER_MS = 1_000_000


def new_id() -> UUID:
    """A UUIDv7: milliseconds since the epoch, 12 bits of their fraction, then 62 random bits, so
    that ids sort by creation, those of one call too, and index well."""
    milliseconds, nanoseconds = divmod(time.time_ns(), _PER_MS)
    return UUID(
        int=(milliseconds << 80)
        | _VERSION_7
        | ((nanoseconds << 12) // _PER_MS << 64)
        | _VARIANT
        | secrets.randbits(62)
    )


def derived_id(name: str) -> UUID:
    """The UUIDv8 of a name: always the same, 122 bits of its SHA-256."""
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).digest()
    bits = int.from_bytes(digest[:16], "big") & ~(_VERSION_BITS | _VARIANT_BITS)
    return UUID(int=bits | _VERSION_8 | _VARIANT)


def former_id(name: str) -> UUID:
    """The id that release 0.1 derives from a name: its row may be there already."""
    return uuid5(_FORMER_IDS, name)


def check_given_id(given: UUID | None, field: str = "id") -> None:
    """Raises Invalid for an id that callers may not choose."""
    if given is not None and given.version == DERIVED_VERSION:
        problem = f"UUIDs of version {DERIVED_VERSION} follow from the names of others' requests"
        raise Invalid(field, problem, "Send another version, such as 4 or 7, or leave it out")


def parse_id(text: str, field: str = "id") -> UUID:
    """The UUID that `text` spells. Raises Invalid, naming `field`."""
    try:
        return UUID(text)
    except ValueError as error:
        raise Invalid(
            field, f"{text[:64]!r} is not a UUID", "Send a UUID or leave it out to get one"
        ) from error


def as_id(value: JobId, field: str = "id") -> UUID:
    """The UUID, also of its text in any form that Python reads. Raises Invalid, naming `field`."""
    if isinstance(value, UUID):
        return value
    remedy = "Pass a UUID or its text"
    if not isinstance(value, str):
        raise Invalid(field, f"{type(value).__name__} is no type of an id", remedy)
    try:
        return UUID(value)
    except ValueError:
        raise Invalid(field, f"{value[:64]!r} is not a UUID", remedy) from None


def as_ids(values: Iterable[JobId], field: str = "ids") -> list[UUID]:
    """Each of them, in their order. Raises Invalid, naming the place of the first wrong one."""
    if isinstance(values, UUID | str | bytes) or not isinstance(values, Iterable):
        raise Invalid(field, f"{type(values).__name__} is no list of ids", "Pass several ids")
    return [as_id(value, f"{field}[{place}]") for place, value in enumerate(values)]


def one_or_many(ids: JobId | Iterable[JobId]) -> list[UUID]:
    """Returns the ids of a caller who may pass a single one as well. Raises Invalid."""
    return [as_id(ids, "ids")] if is_one(ids) else as_ids(ids)


def is_one(ids: JobId | Iterable[JobId]) -> TypeIs[JobId]:
    """Whether it is a single id, and not several."""
    return isinstance(ids, UUID | str)
