"""Ending tasks that do not want to end."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from shardline.base.aio import cancel_and_wait, is_cancelled


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


def test_a_loop_that_looks_ends_with_its_event_loop() -> None:
    """`asyncio.run` asks each task once, and waits for it."""
    num_turns = 0

    async def retrying(started: asyncio.Event) -> None:
        nonlocal num_turns
        while not is_cancelled():
            num_turns += 1
            started.set()
            # As redis-py at times: the cancellation becomes an error of its own.
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async def program() -> None:
        started = asyncio.Event()
        left = asyncio.create_task(retrying(started))
        await started.wait()
        assert not left.done()

    asyncio.run(program())
    assert num_turns == 1
