"""Texts of partial results: what a head would have given out for token ids that no head holds.
Moves no job."""

from __future__ import annotations

from uuid import UUID

import structlog
from sqlalchemy import Engine

from services.relay.loop import POSTGRES_ERRORS
from services.relay.preparation.registered_tokenizers import RegisteredTokenizers
from shardline.base.clock import monotonic_s
from shardline.base.errors import Invalid
from shardline_server.store.sweeps import Partial

log = structlog.get_logger(__name__)

Key = tuple[UUID, int, int]


class PartialTexts:
    """Texts of token ids of jobs that no head holds. A call, inside a transaction, only looks up;
    `catch_up`, between transactions, makes the texts that were missing."""

    def __init__(self, database: Engine, *, budget_s: float) -> None:
        self._tokenizers = RegisteredTokenizers(database)
        self._budget_s = budget_s
        self._texts: dict[Key, str] = {}
        self._unknown: dict[Key, Partial] = {}
        self.was_asked = False
        """Whether there was a call since `catch_up`: there may be more to do at once."""

    def __call__(self, partial: Partial) -> str | None:
        """The text as a head would have ended it, or None until `catch_up` has made it."""
        self.was_asked = True
        text = self._texts.get(partial.key)
        if text is None:
            self._unknown[partial.key] = partial
        return text

    def catch_up(self) -> None:
        """Make the missing texts that fit into the budget, at least one; drop the previous ones. No
        transaction may be open, because a tokenizer may take seconds to load."""
        unknown = self._unknown
        self._unknown = {}
        self._texts = {}
        self.was_asked = False
        if unknown:
            self._tokenizers.refresh()
        until_s = monotonic_s() + self._budget_s
        for key, partial in unknown.items():
            self._texts[key] = self._text(partial)
            if monotonic_s() >= until_s:
                break

    def _text(self, partial: Partial) -> str:
        """Empty when the model is gone: the token ids are kept in any case."""
        try:
            tokens = self._tokenizers.get(partial.model).tokens
            completion = tokens.completion(partial.params, partial.max_tokens, partial.prompt_end)
            return completion.say(partial.ids) + completion.flush()
        except Invalid:
            return ""
        except POSTGRES_ERRORS:
            raise
        # tokenizers panics raise PanicException, which is not an Exception.
        except BaseException:
            log.exception("tokenizer failed", job_id=str(partial.job_id), model=partial.model)
            return ""
