"""The events of a response, for a reader who may leave and join again. Knows no route and checks no
permission."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from functools import partial

import structlog

from services.gateway.context import Gateway
from services.gateway.errors import Stopping, body_of
from services.gateway.http.event_loop import num_named, num_named_of, off_loop
from services.gateway.http.sse import DONE, KEEP_ALIVE, event
from services.gateway.openai.completion_response import merged
from services.gateway.patient_reading import read_patiently
from services.gateway.responses import events
from services.gateway.responses.answers import ResponseAnswers, response_id
from services.gateway.responses.documents import ResponseDocument, Status
from services.gateway.responses.events import ResponseEvent, StateEvent, name_of
from services.gateway.responses.output import ResponseOutput
from shardline.base.errors import NotFound, ShardlineError, Unavailable
from shardline.contract.job import SamplingParams, address_of
from shardline.store.responses import ResponseRow
from shardline.streams import TextOf

log = structlog.get_logger(__name__)

EVENTS_PER_WRITE = 32

BEFORE_ALL = -1
"""The place before the first event."""

ENDS: dict[Status, type[StateEvent]] = {
    "completed": events.ResponseCompleted,
    "incomplete": events.ResponseIncomplete,
    # OpenAI has no event for it.
    "cancelled": events.ResponseIncomplete,
    "failed": events.ResponseFailed,
}


async def response_events(
    gateway: Gateway, answers: ResponseAnswers, *, after: int = BEFORE_ALL
) -> AsyncGenerator[bytes, None]:
    """The events behind number `after`, and `[DONE]`. The last event, which has the whole response,
    is sent in any case. After an error the stream can be joined again."""
    sent = after
    try:
        async for found in _numbered(gateway, answers):
            if found is None:
                yield KEEP_ALIVE
                continue
            for some in _chunks([one for one in found if _is_wanted(one, after)]):
                yield b"".join(event(one, name=name_of(type(one))) for one in some)
                sent = some[-1].sequence_number
    except ShardlineError as error:
        log.warning("response stream interrupted", job_id=str(answers.job.id), error=str(error))
        why = body_of(error).error
        last = events.ErrorEvent(
            sequence_number=max(sent, 0), code=why.code, message=why.message, param=why.param
        )
        yield event(last, name=name_of(type(last)))
    yield DONE


async def _numbered(
    gateway: Gateway, answers: ResponseAnswers
) -> AsyncIterator[Sequence[ResponseEvent] | None]:
    """All events from the first one on, as they come; None where a reader would wait too long for a
    sign of life."""
    job_id = answers.job.id
    keep_alive_s = gateway.settings.http_keep_alive_s
    began_s = sent_s = time.monotonic()
    opening, beginning = _opening(answers)
    output = answers.output(first_number=beginning.sequence_number + 1)
    has_begun = not answers.options.background
    yield [*opening, beginning] if has_begun else opening
    follow = gateway.client.reader.follow
    async for deltas in follow(job_id, text_rule=_no_text, tick_s=keep_alive_s):
        now_s = time.monotonic()
        if gateway.stopping.is_set() and not any(delta.state for delta in deltas):
            raise Stopping(job_id)
        if not deltas:
            if now_s - sent_s >= keep_alive_s:
                sent_s = now_s
                yield None
            continue
        sent_s = now_s
        if not has_begun:
            has_begun = True
            yield [beginning]
        delta = merged(deltas)
        if output.num_tokens == 0:
            gateway.metrics.first_token_seconds.observe(now_s - began_s)
        num_tokens = num_named(delta.ids, delta.logprobs)
        yield await off_loop(partial(output.push, delta.ids, delta.logprobs), num_tokens)
        if delta.state is not None:
            async for last in _end(gateway, answers, output):
                yield last


def _opening(answers: ResponseAnswers) -> tuple[list[ResponseEvent], ResponseEvent]:
    """The events before the first token: those of the moment when the row was committed, and the
    one of its beginning."""
    is_background = answers.options.background
    first = answers.at("queued" if is_background else "in_progress")
    opening: list[ResponseEvent] = [events.ResponseCreated(sequence_number=0, response=first)]
    if is_background:
        opening.append(events.ResponseQueued(sequence_number=1, response=first))
    began = answers.at("in_progress")
    return opening, events.ResponseInProgress(sequence_number=len(opening), response=began)


async def _end(
    gateway: Gateway, answers: ResponseAnswers, output: ResponseOutput
) -> AsyncIterator[Sequence[ResponseEvent] | None]:
    """The last events, from the row as it was committed."""
    async for row in _ended_row(gateway, answers):
        if row is None:
            yield None
            continue
        ended = ResponseAnswers(row=row, tokens=answers.tokens)
        result = row.job.result
        found: list[ResponseEvent] = []
        if result is not None:
            found += output.end(ended.item_status)
        number = output.next_number
        # A result may lack tokens that were streamed, of a job that did not succeed.
        is_same = result is None or output.num_tokens == len(result.token_ids)
        document = (
            ended.document(None if result is None else output) if is_same else await whole(ended)
        )
        yield [*found, ENDS[document.status](sequence_number=number, response=document)]


async def _ended_row(
    gateway: Gateway, answers: ResponseAnswers
) -> AsyncIterator[ResponseRow | None]:
    """The row of an ended job, once, and None while Postgres is away."""
    name = response_id(answers.job.id)
    path = f"/v1/responses/{name}?stream=true&starting_after=…"
    failure = f"The response has ended; join again: GET {path}"

    async def read() -> ResponseRow:
        row = await gateway.client.response(answers.job.id)
        if row is None:
            raise NotFound(f"{name} was deleted")
        if not row.job.state.terminal:
            raise Unavailable(f"the end of {name} is not there yet")
        return row

    async for row in read_patiently(gateway.settings, read, failure=failure):
        yield row


async def answers_of(gateway: Gateway, row: ResponseRow) -> ResponseAnswers:
    """What answers from a row. Raises UnknownModel."""
    model = await gateway.catalog.get(address_of(row.job.model, row.job.params.adapter))
    return ResponseAnswers(row=row, tokens=model.tokens)


async def whole(answers: ResponseAnswers) -> ResponseDocument:
    """The response as its row has it."""
    return await off_loop(answers.whole, num_named_of(answers.job.result))


def _no_text(_params: SamplingParams, _max_tokens: int, _prompt_end: Sequence[int]) -> TextOf:
    """Events have the text of each token from `ResponseOutput`."""
    return lambda _ids: ""


def _is_wanted(one: ResponseEvent, after: int) -> bool:
    """A reader of tokens that were lost with a failed job still learns of its end."""
    return one.sequence_number > after or type(one) in ENDS.values()


def _chunks(found: Sequence[ResponseEvent]) -> Iterator[Sequence[ResponseEvent]]:
    for start in range(0, len(found), EVENTS_PER_WRITE):
        yield found[start : start + EVENTS_PER_WRITE]
