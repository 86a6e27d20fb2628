"""Cancels asyncio tasks reliably. Knows nothing of what they do."""

from __future__ import annotations

import asyncio
from typing import Any

RETRY_S = 0.5


async def cancel_and_wait(task: asyncio.Future[Any]) -> None:
    """Cancel a task, or several that are gathered, until it is done, and ignore how it ended.

    One cancellation may not be enough: a driver may mistake it for its own timeout or a lost
    connection, and a loop that retries after such errors would then run for ever.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=RETRY_S)
    if not task.cancelled():
        task.exception()


def is_cancelled() -> bool:
    """Whether the running task was asked to end, also if a driver has mistaken that for its own
    error.

    `asyncio.run` asks once and then waits for ever: a loop that retries after errors looks here
    before each turn.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
