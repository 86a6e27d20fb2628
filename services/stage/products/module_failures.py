"""What the code of a model may raise, and how it is shown. Knows no model."""

from __future__ import annotations

FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a model's code may raise when it is run in another way than it is used to."""


def first_line(error: Exception) -> str:
    """Returns the message of a failure of a model's code, without what torch lists behind it."""
    return str(error).strip().partition("\n")[0]
