"""Validates and tokenises rows that arrived without it: by Celery, Redis or plain SQL. One bad row holds up nothing."""

from __future__ import annotations

from typing import TypeVar
from uuid import UUID

import msgspec
import structlog
from sqlalchemy import Connection, Engine

from services.relay.loop import Loop
from services.relay.models import KnownModels
from services.relay.outbox import Outbox
from services.relay.results import Results
from shardline.config import Times
from shardline.errors import Invalid
from shardline.job import JobState, Message, Prompt, SamplingParams, TokenId, invalid_from
from shardline.metrics import RelayMetrics
from shardline.store import preparation
from shardline.store.preparation import Ready, Unprepared
from shardline.tokenise import Prepared, Tokens

log = structlog.get_logger(__name__)

Converted = TypeVar("Converted")


class Preparer(Loop):
    """`outbox` is woken when there is something to send."""

    def __init__(
        self, *, database: Engine, outbox: Outbox, results: Results, times: Times, metrics: RelayMetrics
    ) -> None:
        super().__init__("preparer", metrics.errors)
        self._database = database
        self._outbox = outbox
        self._results = results
        self._times = times
        self._metrics = metrics
        self._models = KnownModels()

    def turn(self) -> float:
        """One batch, in one transaction: its rows are ours until they are marked."""
        ready: list[Ready] = []
        refused: dict[UUID, dict[str, str]] = {}
        with self._database.begin() as connection:
            rows = preparation.take_unprepared(connection)
            if rows:
                self._models.refresh(connection)
            for row in rows:
                answer = self._prepare(connection, row)
                if isinstance(answer, Ready):
                    ready.append(answer)
                else:
                    refused[row.id] = answer
            preparation.mark_prepared(connection, ready)
            preparation.mark_failed(connection, refused)
        self._metrics.prepared.inc(len(ready))
        self._metrics.refused.inc(len(refused))
        if ready:
            self._outbox.wake()
        for job_id, error in refused.items():
            self._results.note({job_id: JobState.FAILED}, f"{error['field']}: {error['problem']}. {error['remedy']}")
        return 0.0 if len(rows) == preparation.MAX_BATCH else self._times.poll_s

    def _prepare(self, connection: Connection, row: Unprepared) -> Ready | dict[str, str]:
        try:
            tokens = self._models.get(connection, row.model)
            params = _params(row)
            prepared = _tokenise(tokens, row, params)
        except Invalid as error:
            return error.as_dict()
        return Ready(id=row.id, prompt_ids=prepared.prompt_ids, max_tokens=prepared.max_tokens, seed=params.seed)


def _tokenise(tokens: Tokens, row: Unprepared, params: SamplingParams) -> Prepared:
    prompt, messages = _prompt(row), _messages(row)
    try:
        return tokens.prepare(prompt=prompt, messages=messages, params=params)
    except Invalid:
        raise
    # A row may hold anything, and a panic of the tokenizers library is no Exception.
    except BaseException as error:
        log.exception("tokenizer failed", job_id=str(row.id), model=row.model)
        raise Invalid("prompt", "the model's tokenizer failed on it", "Look at the relay's log of this job") from error


def _params(row: Unprepared) -> SamplingParams:
    try:
        params = msgspec.convert(row.params, SamplingParams)
    except msgspec.ValidationError as error:
        raise invalid_from(error) from error
    return params


def _prompt(row: Unprepared) -> Prompt | None:
    if row.prompt is not None or row.messages is not None:
        return row.prompt
    return _convert(row.prompt_ids, tuple[TokenId, ...], "prompt")


def _messages(row: Unprepared) -> tuple[Message, ...] | None:
    if row.messages is None:
        return None
    messages = _convert(row.messages, tuple[Message, ...], "messages")
    if not messages:
        raise Invalid("messages", "the list is empty", "Send at least one message")
    return messages


def _convert(value: object, kind: type[Converted], field: str) -> Converted:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        invalid = invalid_from(error)
        where = field if invalid.field == "request" else f"{field}{invalid.field}"
        raise Invalid(where, invalid.problem, invalid.remedy) from error
