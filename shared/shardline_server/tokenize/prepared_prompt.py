"""What preparation makes of a request. Knows no tokenizer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPrompt:
    """A request as an engine takes it: ids, and the number of tokens it may generate."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
