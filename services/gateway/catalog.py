"""The models that can be asked for, with their tokenizers. Asks Postgres again when what it knows
is not fresh."""

from __future__ import annotations

import asyncio
import math
import time

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from shardline.base.errors import Invalid, UnknownModel
from shardline.client.database import reachable
from shardline.store import models, pipelines
from shardline_server.tokenize import RegisteredModel, TokenizerCache, addresses

log = structlog.get_logger(__name__)

FRESH_S = 3.0
"""A model that is registered again with other weights, tokens or chat template is seen at the
latest after this: so long two gateways may differ."""


class ModelCatalog:
    """One cache for all requests of a gateway; one request at a time fills it."""

    def __init__(self, database: AsyncEngine) -> None:
        self._database = database
        self._cache = TokenizerCache()
        self._read_s = -math.inf
        self._lock = asyncio.Lock()

    async def get(self, address: str) -> RegisteredModel:
        """A model, or one of its adapters. Raises UnknownModel, naming those that exist, Invalid
        when its tokenizer cannot be read, and Unavailable."""
        if "\0" in address:
            # Postgres holds no such name, and cannot be asked for one.
            raise UnknownModel(address, await self.names())
        if not self._has_fresh(address):
            async with self._lock:
                if not self._has_fresh(address):
                    await self._look_up(address)
        return self._cache.get(address)

    async def names(self) -> list[str]:
        """All registered models, each with its adapters behind it."""
        with reachable():
            async with self._database.connect() as connection:
                adapters = await connection.run_sync(models.adapters)
        return addresses(adapters, adapters)

    async def readable(self) -> list[RegisteredModel]:
        """All of them, but for those that cannot be read or have just gone: one hides no other."""
        found: list[RegisteredModel] = []
        for name in await self.names():
            try:
                found.append(await self.get(name))
            except Invalid as error:
                log.warning("a model is not listed", model=name, problem=error.problem)
        return found

    def _has_fresh(self, address: str) -> bool:
        return time.monotonic() - self._read_s < FRESH_S and self._cache.has(address)

    async def _look_up(self, address: str) -> None:
        """A tokenizer may have many megabytes: its row is read only when the cache lacks it."""
        with reachable():
            async with self._database.connect() as connection:
                fingerprints = await connection.run_sync(models.versions)
                max_tokens = await connection.run_sync(pipelines.longest)
                self._cache.refresh(
                    fingerprints, max_tokens, await connection.run_sync(models.adapters)
                )
                name = self._cache.split(address)[0]
                row = (
                    await connection.run_sync(models.get_model, name)
                    if self._cache.lacks(name)
                    else None
                )
        self._read_s = time.monotonic()
        if row is not None:
            self._cache.add(await asyncio.to_thread(RegisteredModel.from_row, dict(row)))
