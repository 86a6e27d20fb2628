"""The models that can be asked for, with their tokenizers, kept in memory. Asks Postgres again when in doubt."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncEngine

from shardline.client.database import reachable
from shardline.errors import UnknownModel
from shardline.store import models
from shardline.tokenise import Tokens, TokensCache

FRESH_S = 10.0
"""A model that is registered anew, with other weights, is seen at the latest after this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One row of `models`, loaded."""

    name: str
    fingerprint: str
    tokens: Tokens
    created: int
    loaded_s: float

    @property
    def system_fingerprint(self) -> str:
        """Changes with the weights, as OpenAI's field does with a backend."""
        return f"fp_{self.fingerprint[:16]}"


class Catalogue:
    """Bounded by the number of models that stages have registered."""

    def __init__(self, database: AsyncEngine) -> None:
        self._database = database
        self._tokens = TokensCache()
        self._models: dict[str, Model] = {}
        self._lock = asyncio.Lock()

    async def get(self, name: str) -> Model:
        """Raises UnknownModel, naming those that exist, and Unavailable when a model is asked for the first time."""
        model = self._fresh(name)
        if model is None:
            async with self._lock:
                model = self._fresh(name) or await self._load(name)
        return model

    async def names(self) -> list[str]:
        """All registered models."""
        with reachable():
            async with self._database.connect() as connection:
                return await connection.run_sync(models.model_names)

    def _fresh(self, name: str) -> Model | None:
        model = self._models.get(name)
        return model if model is not None and time.monotonic() - model.loaded_s < FRESH_S else None

    async def _load(self, name: str) -> Model:
        with reachable():
            async with self._database.connect() as connection:
                row = await connection.run_sync(models.get_model, name)
                known = [] if row is not None else await connection.run_sync(models.model_names)
        if row is None:
            self._models.pop(name, None)
            raise UnknownModel(name, known)
        # A large tokenizer takes a second to parse: not on the event loop.
        tokens = await asyncio.to_thread(self._tokens.get, dict(row))
        model = Model(
            name=name,
            fingerprint=row["fingerprint"],
            tokens=tokens,
            created=int(row["updated_at"].timestamp()),
            loaded_s=time.monotonic(),
        )
        self._models[name] = model
        return model
