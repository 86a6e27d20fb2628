"""Turns of tenants: one query of each at a time, the others wait for themselves first."""

from __future__ import annotations

import asyncio

import pytest

from services.gateway.turns import MAX_WAITING, TenantTurns
from shardline.base.errors import Overload


async def test_who_asks_much_waits_for_itself_and_not_the_others() -> None:
    turns = TenantTurns(2)
    order = []
    end = asyncio.Event()

    async def ask(tenant: str) -> None:
        async with turns.take(tenant):
            order.append(tenant)
            if tenant == "busy":
                await end.wait()

    busy = [asyncio.create_task(ask("busy")) for _ in range(20)]
    await asyncio.gather(*(ask(tenant) for tenant in ("a", "b", "a")))
    assert order == ["busy", "a", "b", "a"]
    end.set()
    await asyncio.gather(*busy)
    assert order.count("busy") == 20


async def test_a_tenant_over_its_limit_is_told_to_come_again() -> None:
    turns = TenantTurns(2)
    end = asyncio.Event()
    asked = asyncio.Semaphore(0)

    async def ask() -> None:
        asked.release()
        async with turns.take("busy"):
            await end.wait()

    busy = [asyncio.create_task(ask()) for _ in range(MAX_WAITING + 1)]
    for _ in busy:
        await asked.acquire()
    with pytest.raises(Overload):
        await ask()
    async with turns.take("another"):
        end.set()
    await asyncio.gather(*busy)
    await ask()


async def test_a_waiting_query_that_is_cancelled_leaves_the_turns_to_others() -> None:
    turns = TenantTurns(1)
    end = asyncio.Event()
    asked = asyncio.Semaphore(0)

    async def ask() -> None:
        asked.release()
        async with turns.take("a"):
            await end.wait()

    first = asyncio.create_task(ask())
    second = asyncio.create_task(ask())
    for _ in range(2):
        await asked.acquire()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    end.set()
    await first
    await ask()
