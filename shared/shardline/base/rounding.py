"""Whole numbers, rounded up. Knows no unit."""

from __future__ import annotations


def ceil_div(number: int, divisor: int) -> int:
    """The least whole number that is at least `number / divisor`."""
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `number`."""
    return ceil_div(number, multiple) * multiple
