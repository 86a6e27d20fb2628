"""Validates and tokenizes rows that arrived without it: by Celery, Redis or plain SQL. One bad row
delays no other."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TypeVar
from uuid import UUID

import msgspec
import structlog
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from services.relay.celery.celery_results import CeleryResults
from services.relay.loop import POSTGRES_ERRORS, Loop, LoopContext
from services.relay.outbox import Outbox
from services.relay.preparation.registered_tokenizers import RegisteredTokenizers
from services.relay.preparation.waiting_prompts import WaitingPrompts
from shardline.base.clock import monotonic_s
from shardline.base.errors import Invalid
from shardline.contract.chat import Message
from shardline.contract.job import JobState, Prompt, SamplingParams, TokenId, address_of
from shardline.contract.request_parsing import (
    check_metadata,
    invalid_from,
    parse_params,
    parse_retry,
)
from shardline.store.connection.database import failure_of
from shardline.store.tenants import tenant_doors
from shardline_server.store import parents, preparation
from shardline_server.store.preparation import PreparedJob, UnpreparedJob
from shardline_server.tokenize import PreparedPrompt, Tokens

log = structlog.get_logger(__name__)

Converted = TypeVar("Converted")

WAIT_MS = 200
"""For a row that somebody has locked: everybody's preparation waits with it."""

UNPREPARABLE = Invalid("request", "it cannot be prepared", "Look at the relay's log of this job")


class Preparer(Loop):
    """`outbox` is woken when there is something to send."""

    def __init__(self, context: LoopContext, *, outbox: Outbox, results: CeleryResults) -> None:
        super().__init__("preparer", context.metrics.errors)
        self._database = context.database
        self._outbox = outbox
        self._results = results
        self._times = context.times
        self._metrics = context.metrics
        self._spans = context.spans
        self._tokenizers = RegisteredTokenizers(context.database)
        self._waiting = WaitingPrompts(context.database, self._tokenizers)
        self.mark_every_s = context.times.poll_s
        self._lent: deque[UnpreparedJob] = deque()
        """Rows leased by this relay and not yet marked; those of a failed turn are retried
        first."""

    def turn(self) -> float:
        """Release what waited for other jobs and prepare one batch, with no transaction open
        meanwhile; finished rows are marked every `mark_every_s`."""
        with self._database.begin() as connection:
            may_release_more = parents.release(connection)
            if not self._lent:
                self._lent.extend(
                    preparation.take_unprepared(connection, lease_s=self._times.lease_s)
                )
        if not self._lent:
            return 0.0 if may_release_more else self._times.poll_s
        self._tokenizers.refresh()
        while self._lent:
            began_s = monotonic_s()
            answers = self._answers()
            self._mark(answers)
            self._spans.prepared(answers, began_s)
            for _ in answers:
                self._lent.popleft()
        return 0.0

    def _answers(self) -> dict[UUID, PreparedJob | dict[str, str]]:
        """Prepare the first rows that fit into `mark_every_s`, at least one."""
        until_s = monotonic_s() + self.mark_every_s
        answers: dict[UUID, PreparedJob | dict[str, str]] = {}
        for row in self._lent:
            answers[row.id] = self._prepare(row)
            if monotonic_s() >= until_s:
                break
        return answers

    def _mark(self, answers: Mapping[UUID, PreparedJob | dict[str, str]]) -> None:
        """All in one transaction; or one by one, when Postgres cannot hold what one of them
        became."""
        try:
            self._mark_together(answers)
        except (DataError, IntegrityError) as error:
            if len(answers) > 1:
                for job_id, answer in answers.items():
                    self._mark({job_id: answer})
                return
            ((job_id, answer),) = answers.items()
            if not isinstance(answer, PreparedJob):
                raise
            log.warning(
                "a job cannot be stored as prepared",
                job_id=str(job_id),
                error=str(failure_of(error)),
            )
            self._mark_together({job_id: UNPREPARABLE.as_dict()})

    def _mark_together(self, answers: Mapping[UUID, PreparedJob | dict[str, str]]) -> None:
        """What is locked once more, as most locks of ours last a moment; else its loan runs
        out."""
        if self._mark_once(answers, waits=False) == len(answers):
            return
        try:
            self._mark_once(answers, waits=True)
        except DBAPIError as error:
            if not tenant_doors.is_locked_out(error):
                raise

    def _mark_once(
        self, answers: Mapping[UUID, PreparedJob | dict[str, str]], *, waits: bool
    ) -> int:
        """Returns how many were marked, or ended."""
        ready = [answer for answer in answers.values() if isinstance(answer, PreparedJob)]
        errors = {
            job_id: answer
            for job_id, answer in answers.items()
            if not isinstance(answer, PreparedJob)
        }
        with self._database.begin() as connection:
            if waits:
                tenant_doors.wait_briefly(connection, wait_ms=WAIT_MS)
            num_prepared = preparation.mark_if_unprepared(connection, ready, waits=waits)
            refused = preparation.fail_if_unprepared(connection, errors, waits=waits)
        self._metrics.prepared.inc(num_prepared)
        self._metrics.refused.inc(len(refused))
        if ready:
            self._outbox.wake()
        for job_id in refused:
            error = errors[job_id]
            log.info(
                "job refused", job_id=str(job_id), field=error["field"], problem=error["problem"]
            )
            self._results.note(
                {job_id: JobState.FAILED},
                f"{error['field']}: {error['problem']}. {error['remedy']}",
            )
        return num_prepared + len(refused)

    def _prepare(self, row: UnpreparedJob) -> PreparedJob | dict[str, str]:
        try:
            params = _params(row)
            model = self._tokenizers.get(address_of(row.model, params.adapter))
            prepared = self._tokenize(model.tokens, row, params)
        except Invalid as error:
            return error.as_dict()
        except (*POSTGRES_ERRORS, SystemExit, KeyboardInterrupt):
            raise
        # Whatever a row or its tokenizer holds, those behind it are prepared: tokenizers panics
        # raise PanicException, which is not an Exception.
        except BaseException:
            log.exception("a job cannot be prepared", job_id=str(row.id), model=row.model)
            return UNPREPARABLE.as_dict()
        return PreparedJob(
            id=row.id,
            model=model.name,
            adapter=model.adapter,
            prompt_ids=prepared.prompt_ids,
            max_tokens=prepared.max_tokens,
            seed=params.seed,
        )

    def _tokenize(
        self, tokens: Tokens, row: UnpreparedJob, params: SamplingParams
    ) -> PreparedPrompt:
        prompt = _prompt(row)
        messages = _messages(row)
        if row.depends_on is not None:
            prompt, messages = self._waiting.fill(row.id, row.depends_on, prompt, messages)
        try:
            return tokens.prepare(prompt=prompt, messages=messages, params=params)
        except Invalid:
            raise
        # tokenizers panics raise PanicException, which is not an Exception.
        except BaseException as error:
            log.exception("tokenizer failed", job_id=str(row.id), model=row.model)
            remedy = "Look at the relay's log of this job"
            raise Invalid("prompt", "the model's tokenizer failed on it", remedy) from error


def _params(row: UnpreparedJob) -> SamplingParams:
    try:
        params = parse_params(row.params)
    except msgspec.ValidationError as error:
        invalid = invalid_from(error)
        field = "params" if invalid.field == "request" else invalid.field
        raise Invalid(field, invalid.problem, invalid.remedy) from error
    if row.retry is not None:
        parse_retry(row.retry)
    check_metadata(row.metadata)
    return params


def _prompt(row: UnpreparedJob) -> Prompt | None:
    if row.prompt is not None or row.messages is not None:
        return row.prompt
    return _convert(row.prompt_ids, tuple[TokenId, ...], "prompt")


def _messages(row: UnpreparedJob) -> tuple[Message, ...] | None:
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
