"""The text that a head has given out after so many tokens: by the rules of the engine's detokeniser and stop finder.

With it a reader can go on from the tokens in Postgres exactly where a stream was cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardline.job import SamplingParams
from shardline.streams import TextOf
from shardline.tokenise import Tokens

BROKEN = "\ufffd"
MAX_PENDING_CHARS = 3
"""A character has at most four bytes: up to three may wait for the last one."""


def settled_text(tokens: Tokens, params: SamplingParams) -> TextOf:
    """For one job: a function of its output tokens so far."""
    silent = {*tokens.eos_ids, *params.stop_token_ids}

    def text_of(ids: Sequence[int]) -> str:
        spoken = ids[:-1] if ids and ids[-1] in silent else ids
        text = tokens.decode(spoken)
        pending = text[-MAX_PENDING_CHARS:]
        text = text[: len(text) - len(pending)] + pending.rstrip(BROKEN)
        held = max((_num_matched(text, stop) for stop in params.stop), default=0)
        return text[: len(text) - held]

    return text_of


def _num_matched(text: str, stop: str) -> int:
    """How much of the stop string's beginning ends the text."""
    return next((size for size in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:size])), 0)
