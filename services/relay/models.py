"""The tokenizers of registered models, loaded once each. Knows no job."""

from __future__ import annotations

from collections.abc import Sequence

import structlog
from sqlalchemy import Engine, RowMapping

from shardline.errors import Invalid, UnknownModel
from shardline.job import SamplingParams
from shardline.store import models, pipelines
from shardline.tokenise import Tokens

log = structlog.get_logger(__name__)


class KnownModels:
    """For one thread. A model that is registered anew is loaded anew, with no transaction open meanwhile."""

    def __init__(self, database: Engine) -> None:
        self._database = database
        self._loaded: dict[str, tuple[str, Tokens]] = {}
        self._versions: dict[str, str] = {}
        self._longest: dict[str, int] = {}

    def refresh(self) -> None:
        """Once a batch: which models there are; forgets what is no more."""
        with self._database.begin() as connection:
            self._versions, self._longest = models.versions(connection), pipelines.longest(connection)
        self._loaded = {name: loaded for name, loaded in self._loaded.items() if self._versions.get(name) == loaded[0]}

    def get(self, name: str) -> Tokens:
        """Raises UnknownModel, and Invalid when its tokenizer cannot be read."""
        if name not in self._loaded:
            row = self._row(name) if name in self._versions else None
            if row is None:
                raise UnknownModel(name, list(self._versions))
            self._loaded[name] = row["fingerprint"], Tokens.from_row(dict(row))
        return self._loaded[name][1].within(self._longest.get(name))

    def _row(self, name: str) -> RowMapping | None:
        with self._database.begin() as connection:
            return models.get_model(connection, name)


class Decoder:
    """Text of a partial result: token ids of a job that no head holds."""

    def __init__(self, database: Engine) -> None:
        self._models = KnownModels(database)

    def __call__(self, model: str, params: SamplingParams, max_tokens: int, ids: Sequence[int]) -> str:
        """As a head would have ended it. Empty when the model is gone: the token ids are kept in any case."""
        self._models.refresh()
        try:
            completion = self._models.get(model).completion(params, max_tokens)
            return completion.say(ids) + completion.flush()
        except Invalid:
            return ""
        # A panic of the tokenizers library is no Exception.
        except BaseException:
            log.exception("tokenizer failed", model=model)
            return ""
