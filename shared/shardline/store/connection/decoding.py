"""What Postgres holds and Python does not, read so that one such value keeps no reader from the
others of its query.

A row may be written by hand: a number of a million digits, a moment called infinity. Knows no
table.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from psycopg import DataError
from psycopg.abc import AdaptContext, Buffer
from psycopg.types.datetime import TimestamptzLoader

MAX_DIGITS = 4_300
"""Python makes no integer of more, since that takes quadratic time."""

FIRST = datetime.min.replace(tzinfo=UTC)
LAST = datetime.max.replace(tzinfo=UTC)


class NearestTimestamptz(TimestamptzLoader):
    """A moment that Python has not (infinity, or a year without four digits) as the first or last
    that it has."""

    def load(self, data: Buffer) -> datetime:
        """Never raises."""
        try:
            return super().load(data)
        except (DataError, OverflowError):
            text = bytes(data)
            return FIRST if text.startswith(b"-") or text.endswith(b"BC") else LAST


def load_json(text: str | bytes) -> Any:
    """Reads as `json.loads`; a number that Python has not is its text, and so is what is nested too
    deep to be read: both fail the checks of callers that need something else there."""
    try:
        try:
            return json.loads(text)
        except ValueError:
            return json.loads(text, parse_int=_integer)
    except RecursionError:
        return text if isinstance(text, str) else text.decode()


def register(context: AdaptContext) -> None:
    """Registers the loaders for one connection."""
    context.adapters.register_loader("timestamptz", NearestTimestamptz)


def _integer(text: str) -> int | str:
    return int(text) if len(text) <= MAX_DIGITS else text
