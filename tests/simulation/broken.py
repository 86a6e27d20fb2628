"""What a seed fails with."""

from __future__ import annotations


class Broken(AssertionError):
    """An invariant does not hold."""


def require(holds: bool, problem: str) -> None:
    """An invariant."""
    if not holds:
        raise Broken(problem)
