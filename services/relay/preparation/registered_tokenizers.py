"""The tokenizers of registered models, as one thread of a relay sees them. Knows no job."""

from __future__ import annotations

from sqlalchemy import Engine, RowMapping

from shardline.store import models, pipelines
from shardline_server.tokenize import RegisteredModel, TokenizerCache


class RegisteredTokenizers:
    """Use it from one thread. A model that is registered again is loaded again, while no
    transaction is open."""

    def __init__(self, database: Engine) -> None:
        self._database = database
        self._cache = TokenizerCache()

    def refresh(self) -> None:
        """Read which models are registered. Call it once per batch."""
        with self._database.begin() as connection:
            fingerprints = models.versions(connection)
            max_tokens = pipelines.longest(connection)
            adapters = models.adapters(connection)
        self._cache.refresh(fingerprints, max_tokens, adapters)

    def get(self, address: str) -> RegisteredModel:
        """A model or one of its adapters. Raises UnknownModel, and Invalid when its tokenizer
        cannot be read."""
        if self._cache.lacks(address):
            row = self._row(self._cache.split(address)[0])
            if row is not None:
                self._cache.add(RegisteredModel.from_row(dict(row)))
        return self._cache.get(address)

    def _row(self, name: str) -> RowMapping | None:
        with self._database.begin() as connection:
            return models.get_model(connection, name)
