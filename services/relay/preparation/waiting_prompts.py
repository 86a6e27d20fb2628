"""The prompts of jobs that waited for others: their texts with those of their parents. A function
of rows alone, so that a second preparation gives the same. Changes no row."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Engine

from services.relay.preparation.registered_tokenizers import RegisteredTokenizers
from shardline.base.errors import Invalid
from shardline.contract.chat import Message
from shardline.contract.job import Prompt
from shardline.contract.parents.parent_job import (
    FIELD,
    MAX_FILLED_CHARS,
    Parents,
    check_parents,
    filled,
)
from shardline.contract.plain_json import without_nulls
from shardline.contract.request_parsing import invalid_from
from shardline_server.store import parents
from shardline_server.store.parents import ParentText


class ParentFailed(Invalid):
    """A parent did not succeed, and its child is not to run without: `error` is its end."""

    def __init__(self, error: dict[str, str]) -> None:
        super().__init__(error["field"], error["problem"], error["remedy"])
        self.error = error

    def as_dict(self) -> dict[str, str]:
        """The form stored in `jobs.error`."""
        return self.error


class WaitingPrompts:
    """Fills prompts, between transactions."""

    def __init__(self, database: Engine, tokenizers: RegisteredTokenizers) -> None:
        self._database = database
        self._tokenizers = tokenizers

    def fill(
        self,
        job_id: UUID,
        depends_on: Any,
        prompt: Prompt | None,
        messages: tuple[Message, ...] | None,
    ) -> tuple[Prompt | None, tuple[Message, ...] | None]:
        """Returns the prompt and the messages of a released job with its parents' texts. Raises
        Invalid."""
        try:
            waited = msgspec.convert(without_nulls(depends_on), Parents)
        except msgspec.ValidationError as error:
            invalid = invalid_from(error)
            raise Invalid(FIELD, invalid.problem, invalid.remedy) from error
        check_parents(waited, prompt, messages)
        named = {parent.job for parent in waited if parent.name is not None}
        with self._database.begin() as connection:
            failed = parents.failure(connection, job_id)
            if failed is not None:
                raise ParentFailed(failed)
            found = parents.parent_texts(connection, job_id, named)
        texts = {one.job_id: self._said(one) for one in found}
        by_name = {
            parent.name: texts.get(parent.job, "") for parent in waited if parent.name is not None
        }
        return filled(prompt, messages, by_name)

    def _said(self, parent: ParentText) -> str:
        """What a reader of the parent gets: of a chat its content."""
        if parent.text is None:
            problem = f"its parents have more than {MAX_FILLED_CHARS} bytes of text together"
            raise Invalid(FIELD, problem, "Bound their max_tokens, or use fewer of their texts")
        if not parent.is_chat or parent.params.question is not None:
            return parent.text
        tokens = self._tokenizers.get(parent.address).tokens
        return tokens.chat.reply(
            parent.text, parent.params, parent.job_id, parent.prompt_end
        ).content
