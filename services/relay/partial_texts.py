"""Texts of partial results: what a head would have given out for token ids that no head holds. Moves no job."""

from __future__ import annotations

import time
from uuid import UUID

import structlog
from sqlalchemy import Engine

from services.relay.loop import POSTGRES_ERRORS
from services.relay.registered_tokenizers import RegisteredTokenizers
from shardline.errors import Invalid
from shardline.store.sweeps import Partial

log = structlog.get_logger(__name__)

Key = tuple[UUID, int, int]


class PartialTexts:
    """Texts of partial results: token ids of jobs that no head holds. Asked while a transaction is open, it only looks
    up; what it did not know, it makes before the next."""

    def __init__(self, database: Engine, *, budget_s: float) -> None:
        self._tokenizers = RegisteredTokenizers(database)
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
            self._tokenizers.refresh()
        until_s = time.monotonic() + self._budget_s
        for key, partial in unknown.items():
            self._texts[key] = self._text(partial)
            if time.monotonic() >= until_s:
                break

    def _text(self, partial: Partial) -> str:
        """Empty when the model is gone: the token ids are kept in any case."""
        try:
            completion = self._tokenizers.get(partial.model).completion(partial.params, partial.max_tokens)
            return completion.say(partial.ids) + completion.flush()
        except Invalid:
            return ""
        except POSTGRES_ERRORS:
            raise
        # A panic of the tokenizers library is no Exception.
        except BaseException:
            log.exception("tokenizer failed", job_id=str(partial.job_id), model=partial.model)
            return ""
