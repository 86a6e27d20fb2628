"""Rates as an operator gives them: a number, or a series at an address. Knows no database."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec

from shardline.base.clock import monotonic_s
from shardline.base.errors import Invalid

TIMEOUT_S = 10.0
"""Of the connection and of each answer to a read; a whole series may take three of them."""
MAX_BYTES = 4 << 20
MAX_RATES = 50_000
"""Five years of hours."""

REMEDY = (
    "Give a number, or CSV lines `time,value`, "
    'or JSON `[{"time": "2026-01-01T00:00:00Z", "value": 0.31}]`'
)


class RateEntry(msgspec.Struct):
    """One rate of a series in JSON."""

    time: datetime
    value: float


def read_rates(source: str, field: str) -> float | Mapping[datetime, float]:
    """A number, or the rates of a series by the moment from which they hold. Raises Invalid, naming
    `field`, OSError for a file and httpx.HTTPError for an address that cannot be read."""
    # Not in an `except`: the address, with its password, would be part of what is raised.
    return (
        _finite(float(source), field)
        if _is_number(source)
        else _series(_text(source, field), field)
    )


def _text(source: str, field: str) -> str:
    data = _fetch(source) if source.startswith(("http://", "https://")) else _read(Path(source))
    if len(data) > MAX_BYTES:
        raise Invalid(
            field, f"the series is longer than {MAX_BYTES} bytes", "Give the rates of fewer hours"
        )
    return data.decode("utf-8", "replace")


def _read(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(MAX_BYTES + 1)


def _fetch(address: str) -> bytes:
    data = bytearray()
    until_s = monotonic_s() + 3 * TIMEOUT_S
    with httpx.stream("GET", address, timeout=TIMEOUT_S) as answer:
        answer.raise_for_status()
        for chunk in answer.iter_bytes():
            data += chunk
            if len(data) > MAX_BYTES:
                break
            if monotonic_s() > until_s:
                raise httpx.ReadTimeout(
                    f"the series had not come after {3 * TIMEOUT_S:.0f} s", request=answer.request
                )
    return bytes(data)


def _series(content: str, field: str) -> dict[datetime, float]:
    try:
        entries = _of_json(content) if content.lstrip().startswith("[") else _of_csv(content)
        rates = {_aware(time): _finite(value, field) for time, value in entries}
    except (ValueError, csv.Error, msgspec.MsgspecError) as error:
        raise Invalid(field, f"the series cannot be read: {error}", REMEDY) from error
    if not 0 < len(rates) <= MAX_RATES:
        raise Invalid(
            field, f"the series has {len(rates)} rates; it may have 1 to {MAX_RATES}", REMEDY
        )
    return rates


def _of_json(content: str) -> Iterable[tuple[datetime, float]]:
    return [
        (entry.time, entry.value) for entry in msgspec.json.decode(content, type=list[RateEntry])
    ]


def _of_csv(content: str) -> Iterator[tuple[datetime, float]]:
    """Without the first line if that is a header."""
    rows: list[Any] = [row for row in csv.reader(content.splitlines()) if row]
    for place, row in enumerate(rows):
        if len(row) != 2:
            raise ValueError(f"line {place + 1} has {len(row)} columns, not time and value")
        if place > 0 or _is_number(row[1]):
            yield datetime.fromisoformat(row[0].strip()), float(row[1])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _aware(time: datetime) -> datetime:
    """A time without a zone is UTC."""
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _finite(value: float, field: str) -> float:
    if not math.isfinite(value):
        raise Invalid(field, f"{value} is no rate", REMEDY)
    return value
