"""Queries of routes that read them themselves: known names only, each once. Raises Invalid, naming
the parameter."""

from __future__ import annotations

from fastapi import Request

from shardline.base.errors import Invalid

MAX_DIGITS = 12
"""Of a number, without zeros before it."""


def query(request: Request, *names: str) -> dict[str, str]:
    """The query, with known names only: a misspelled filter would be ignored without a word."""
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in names:
            raise Invalid(
                name[:32], "there is no such query parameter", f"Use one of: {', '.join(names)}"
            )
        if name in found:
            raise Invalid(name, "it is given twice", "Send it once")
        if "\0" in value:
            raise Invalid(name, "it holds a NUL character", "Leave it out")
        found[name] = value
    return found


def number(field: str, text: str, *, minimum: int, maximum: int) -> int:
    """A whole number within limits."""
    digits = text.lstrip("0") or text[-1:]
    is_number = digits.isascii() and digits.isdecimal() and len(digits) <= MAX_DIGITS
    if not is_number or not minimum <= int(digits) <= maximum:
        raise Invalid(
            field,
            f"{text[:32]!r} is not a number from {minimum} to {maximum}",
            "Send one, or leave it out",
        )
    return int(digits)
