"""The tokenizers of registered models, loaded once each. Knows no job."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, Engine

from shardline.errors import Invalid, UnknownModel
from shardline.job import SamplingParams
from shardline.store import models
from shardline.tokenise import Tokens


class KnownModels:
    """For one thread. A model that is registered anew is loaded anew."""

    def __init__(self) -> None:
        self._loaded: dict[str, tuple[str, Tokens]] = {}
        self._versions: dict[str, str] = {}

    def refresh(self, connection: Connection) -> None:
        """Once a batch: which models there are; forgets what is no more."""
        self._versions = models.versions(connection)
        self._loaded = {name: loaded for name, loaded in self._loaded.items() if self._versions.get(name) == loaded[0]}

    def get(self, connection: Connection, name: str) -> Tokens:
        """Raises UnknownModel, and Invalid when its tokenizer cannot be read."""
        if name not in self._loaded:
            row = models.get_model(connection, name) if name in self._versions else None
            if row is None:
                raise UnknownModel(name, list(self._versions))
            self._loaded[name] = row["fingerprint"], Tokens.from_row(dict(row))
        return self._loaded[name][1]


class Decoder:
    """Text of a partial result: token ids of a job that no head holds."""

    def __init__(self, database: Engine) -> None:
        self._database = database
        self._models = KnownModels()

    def __call__(self, model: str, params: SamplingParams, max_tokens: int, ids: Sequence[int]) -> str:
        """As a head would have ended it. Empty when the model is gone: the token ids are kept in any case."""
        with self._database.begin() as connection:
            self._models.refresh(connection)
            try:
                completion = self._models.get(connection, model).completion(params, max_tokens)
            except Invalid:
                return ""
        return completion.say(ids) + completion.flush()
