"""How long a job took, as its caller sees it. Owns the three times that operators compare; knows no
row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Holds the latencies of one ended job, in seconds. It counts from the moment at which the job
    was due."""

    whole_s: float
    """To the COMMIT of its end, earlier attempts included."""
    first_token_s: float | None
    """To its first token; None: it had none, or an earlier attempt made it."""
    token_s: float | None
    """Between two tokens of this attempt, on average; None: it made fewer than two."""
