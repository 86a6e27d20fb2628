"""The tokenizers of registered models, loaded once each. Knows no job."""

from __future__ import annotations

import time
from uuid import UUID

import structlog
from sqlalchemy import Engine, RowMapping

from services.relay.loop import POSTGRES_ERRORS
from shardline.errors import Invalid, UnknownModel
from shardline.store import models, pipelines
from shardline.store.sweeps import Partial
from shardline.tokenise import Tokens

log = structlog.get_logger(__name__)

Key = tuple[UUID, int, int]


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
    """Texts of partial results: token ids of jobs that no head holds. Asked while a transaction is open, it only looks
    up; what it did not know, it makes before the next."""

    def __init__(self, database: Engine, *, budget_s: float) -> None:
        self._models = KnownModels(database)
        self._budget_s = budget_s
        self._texts: dict[Key, str] = {}
        self._unknown: dict[Key, Partial] = {}
        self.was_asked = False
        """Since `catch_up`: there may be more to do at once."""

    def __call__(self, partial: Partial) -> str | None:
        """As a head would have ended it; None when `catch_up` has to make it first."""
        self.was_asked = True
        text = self._texts.get(partial.key)
        if text is None:
            self._unknown[partial.key] = partial
        return text

    def catch_up(self) -> None:
        """While no transaction is open: a tokenizer may take seconds to load. Makes what was asked for, one text at
        least and as many as fit into the budget; forgets those of the last time."""
        unknown, self._unknown, self._texts, self.was_asked = self._unknown, {}, {}, False
        if unknown:
            self._models.refresh()
        until_s = time.monotonic() + self._budget_s
        for key, partial in unknown.items():
            self._texts[key] = self._text(partial)
            if time.monotonic() >= until_s:
                break

    def _text(self, partial: Partial) -> str:
        """Empty when the model is gone: the token ids are kept in any case."""
        try:
            completion = self._models.get(partial.model).completion(partial.params, partial.max_tokens)
            return completion.say(partial.ids) + completion.flush()
        except Invalid:
            return ""
        except POSTGRES_ERRORS:
            raise
        # A panic of the tokenizers library is no Exception.
        except BaseException:
            log.exception("tokenizer failed", job_id=str(partial.job_id), model=partial.model)
            return ""
