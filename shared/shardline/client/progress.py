"""What a follower makes of the rows of its job. Knows no stream and no connection."""

from __future__ import annotations

from collections.abc import Callable

from shardline.job import SamplingParams
from shardline.store.progress import Progress
from shardline.streams import Cursor, TextOf

TextRule = Callable[[SamplingParams, int], TextOf]
"""For a job of these parameters and `max_tokens`: the text that a head gives out with its tokens."""


def learn(cursor: Cursor, progress: Progress, *, only_learn: bool = False) -> None:
    """One page for one reader."""
    cursor.catch_up(
        progress.start,
        progress.token_ids,
        fence=progress.fence,
        only_learn=only_learn,
        logprobs=progress.logprobs,
        text=progress.text,
        state=progress.state,
        finish_reason=progress.finish_reason,
    )
