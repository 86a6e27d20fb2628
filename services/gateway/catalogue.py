"""The models that can be asked for, with their tokenizers, kept in memory. Asks Postgres again when in doubt."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from shardline.client.database import reachable
from shardline.errors import UnknownModel
from shardline.store import models, pipelines
from shardline.tokenise import Tokens

FRESH_S = 10.0
"""A model that is registered anew, with other weights, is seen at the latest after this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One row of `models`, loaded."""

    name: str
    fingerprint: str
    tokens: Tokens
    created: int

    def within(self, kv_tokens: int | None) -> Model:
        """The same, for pipelines whose KV holds so many tokens."""
        return replace(self, tokens=self.tokens.within(kv_tokens))

    @property
    def system_fingerprint(self) -> str:
        """Changes with the weights, as OpenAI's field does with a backend."""
        return f"fp_{self.fingerprint[:16]}"


class Catalogue:
    """Bounded by the number of models that stages have registered."""

    def __init__(self, database: AsyncEngine) -> None:
        self._database = database
        self._models: dict[str, Model] = {}
        self._versions: dict[str, str] = {}
        self._read_s = -math.inf
        self._lock = asyncio.Lock()

    async def get(self, name: str) -> Model:
        """Raises UnknownModel, naming those that exist, and Unavailable."""
        model = self._known(name)
        if model is None:
            async with self._lock:
                model = self._known(name) or await self._look_up(name)
        return model

    async def names(self) -> list[str]:
        """All registered models."""
        with reachable():
            async with self._database.connect() as connection:
                return await connection.run_sync(models.model_names)

    def _known(self, name: str) -> Model | None:
        """Loaded, of the version that Postgres had a short while ago."""
        model = self._models.get(name)
        is_fresh = time.monotonic() - self._read_s < FRESH_S
        return model if is_fresh and model and self._versions.get(name) == model.fingerprint else None

    async def _look_up(self, name: str) -> Model:
        """A tokenizer may have many megabytes: it is read only when it is another one."""
        with reachable():
            async with self._database.connect() as connection:
                versions = await connection.run_sync(models.versions)
                longest = await connection.run_sync(pipelines.longest)
                model = self._models.get(name)
                is_other = name in versions and (model is None or model.fingerprint != versions[name])
                row = await connection.run_sync(models.get_model, name) if is_other else None
        self._versions, self._read_s = versions, time.monotonic()
        self._models = {name: model for name, model in self._models.items() if name in versions}
        if row is not None:
            self._models[name] = await asyncio.to_thread(_load, dict(row))
        self._models = {name: model.within(longest.get(name)) for name, model in self._models.items()}
        if name not in self._models:
            raise UnknownModel(name, list(versions))
        return self._models[name]


def _load(row: Mapping[str, Any]) -> Model:
    return Model(
        name=row["name"],
        fingerprint=row["fingerprint"],
        tokens=Tokens.from_row(row),
        created=int(row["updated_at"].timestamp()),
    )
