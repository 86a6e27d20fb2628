"""Ending tasks that do not want to end."""

from __future__ import annotations

import asyncio

from shardline.aio import cancel_and_wait


async def test_a_loop_that_takes_a_cancellation_for_a_timeout_ends() -> None:
    swallowed = 0
    started = asyncio.Event()

    async def stubborn() -> None:
        nonlocal swallowed
        started.set()
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if swallowed == 2:
                    raise
                swallowed += 1

    task = asyncio.create_task(stubborn())
    await started.wait()

    await cancel_and_wait(task)

    assert task.cancelled()
    assert swallowed == 2


async def test_ending_a_failed_task_raises_nothing() -> None:
    async def broken() -> None:
        raise OSError("gone")

    task = asyncio.create_task(broken())
    await asyncio.wait({task})

    await cancel_and_wait(task)

    assert task.done()
