"""W3C Trace Context: what a `traceparent` may be. Knows no tracer."""

from __future__ import annotations

import re

TRACEPARENT = (
    r"^(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?$"
)
"""A version after 00 may have more behind it."""

MAX_TRACEPARENT_CHARS = 256


def is_traceparent(text: str | None) -> bool:
    """Whether this is one. A service that passes on headers drops what is none, as W3C asks."""
    return (
        text is not None
        and len(text) <= MAX_TRACEPARENT_CHARS
        and re.search(TRACEPARENT, text) is not None
    )
