"""One connection of a pool for many statements, each in a separate transaction. Knows no
statement.

To take a connection from the pool, ping it and give it back takes more time than a small statement.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from contextlib import suppress
from typing import Self, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from shardline.store.connection.database import autocommitted

Answer = TypeVar("Answer")


class HeldConnection:
    """`async with HeldConnection(engine) as held:`, for one task, and for a short while: only the
    pool finds out that a server is gone without a word."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = autocommitted(engine)
        self._connection: AsyncConnection | None = None
        self._unasked = select.poll()
        """Tells of what has come and answers no statement: the farewell of a server."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._give_back()

    async def ask(self, question: Callable[[Connection], Answer]) -> Answer:
        """Asks by one statement. Raises what the driver and the pool raise."""
        if self._connection is not None and self._unasked.poll(0):
            await self._give_back()
        connection = self._connection or await self._take()
        try:
            return await connection.run_sync(question)
        except BaseException:
            await self._give_back()
            raise

    async def _take(self) -> AsyncConnection:
        connection = await self._engine.connect()
        self._connection = connection
        driver = (await connection.get_raw_connection()).driver_connection
        assert driver is not None
        self._unasked = select.poll()
        self._unasked.register(driver.fileno(), select.POLLIN)
        return connection

    async def _give_back(self) -> None:
        connection = self._connection
        self._connection = None
        if connection is not None:
            # One that cannot even be given back is lost, and the pool knows.
            with suppress(DBAPIError):
                await connection.close()
