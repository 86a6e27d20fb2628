"""Ends asyncio tasks for certain. Knows nothing of what they do."""

from __future__ import annotations

import asyncio
from typing import Any

AGAIN_S = 0.5


async def cancel_and_wait(task: asyncio.Task[Any]) -> None:
    """Cancels until the task is done; how it ended is nobody's business any more.

    Once is not enough: a driver may take a cancellation that meets its own timeout or lost connection for that, and a
    loop that outlives such errors would go on for ever.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=AGAIN_S)
    if not task.cancelled():
        task.exception()
