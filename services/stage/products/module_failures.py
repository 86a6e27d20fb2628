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

MAX_LINE_CHARS = 96


def first_line(error: Exception) -> str:
    """Returns the message of a failure of a model's code, without what torch lists behind it."""
    line = str(error).strip().partition("\n")[0]
    return line if len(line) <= MAX_LINE_CHARS else f"{line[:MAX_LINE_CHARS]}..."
