"""Queries of routes that read them themselves: known names only, each once. Raises Invalid, naming the parameter."""

from __future__ import annotations

from fastapi import Request

from shardline.errors import Invalid


def query(request: Request, *names: str) -> dict[str, str]:
    """The query, with known names only: a misspelled filter would be ignored without a word."""
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in names:
            raise Invalid(name[:32], "there is no such query parameter", f"Use one of: {', '.join(names)}")
        if name in found:
            raise Invalid(name, "it is given twice", "Send it once")
        found[name] = value
    return found


def number(field: str, text: str, *, minimum: int, maximum: int) -> int:
    """A whole number within limits."""
    if not (text.isascii() and text.isdecimal()) or not minimum <= int(text[:12]) <= maximum:
        raise Invalid(field, f"{text[:32]!r} is not a number from {minimum} to {maximum}", "Send one, or leave it out")
    return int(text)
