"""Waiting for what other threads and processes do: the same question until the answer is true.
Knows no condition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

PATIENCE_S = 600.0
"""A whole stack starts within it on a busy machine. pytest ends a test after 900 s."""
LOOK_S = 0.05

Answer = TypeVar("Answer")


def until(
    question: Callable[[], Answer], *, timeout_s: float = PATIENCE_S, look_s: float = LOOK_S
) -> Answer:
    """The first true answer. Raises tenacity.RetryError when there is none in time."""
    return _asking(timeout_s, look_s)(question)


def within(timeout_s: float, question: Callable[[], object], *, look_s: float = LOOK_S) -> bool:
    """Whether there is a true answer in time."""
    return bool(_asking(timeout_s, look_s, retry_error_callback=lambda _: False)(question))


def _asking(timeout_s: float, look_s: float, **options: Any) -> Retrying:
    return Retrying(
        wait=wait_fixed(look_s),
        stop=stop_after_delay(timeout_s),
        retry=retry_if_result(lambda answer: not answer),
        **options,
    )
