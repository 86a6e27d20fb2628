"""Keeps the event loop free for other requests: work on many tokens goes to a thread. Knows no form
of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from shardline.contract.job import Result, TokenLogprob

Value = TypeVar("Value")

MAX_AT_ONCE = 256
"""Tokens turned to text between two looks at other tasks: 0.1 ms each in the slowest form."""


async def off_loop(work: Callable[[], Value], num_tokens: int) -> Value:
    """Does work on few tokens at once, and on many on a thread, so that other requests proceed."""
    return await asyncio.to_thread(work) if num_tokens > MAX_AT_ONCE else work()


def num_named(token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> int:
    """Counts the tokens that an answer has texts of: its own and their alternatives."""
    return len(token_ids) + sum(len(entry.top) for entry in logprobs or ())


def num_named_of(result: Result | None) -> int:
    """Counts the tokens that a job's whole answer has texts of."""
    if result is None:
        return 0
    scores = [score for score in result.prompt_logprobs or () if score is not None]
    return num_named(result.token_ids, result.logprobs) + sum(1 + len(each.top) for each in scores)
