"""Waits for a job and answers its caller, with the whole completion or a stream. Knows no route.

A caller who disconnects cancels the job, unless the request can be repeated: with an id or a key of
the caller's own the repeat finds the same job.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from functools import partial
from typing import Any
from uuid import UUID

import structlog
from fastapi import Request, Response
from msgspec import UNSET
from msgspec.structs import replace

from services.gateway.context import Gateway
from services.gateway.errors import (
    CLIENT_CLOSED_REQUEST,
    Stopping,
    body_of,
    error_of_job,
    json_response,
    respond,
)
from services.gateway.http.event_loop import num_named, num_named_of, off_loop
from services.gateway.http.sse import DONE, KEEP_ALIVE, EventStream, disconnected, event
from services.gateway.openai.bodies import AnswerHead, ChatCompletion, Completion, OpenAiRequest
from services.gateway.openai.reply_reader import NOTHING
from services.gateway.openai.responses import OpenAiResponses
from services.gateway.openai.service_tier import tier_used
from services.gateway.openai.system_fingerprint import system_fingerprint
from services.gateway.submit import AcceptedJob
from shardline.base.aio import cancel_and_wait
from shardline.base.errors import JobEnded, ShardlineError, Unavailable
from shardline.base.log import job_context
from shardline.client.requests import succeeded
from shardline.contract.job import FinishReason, Job, JobRequest, JobState, Result, Usage
from shardline.contract.wire import Delta
from shardline_server.tracing import JobTrace

log = structlog.get_logger(__name__)


async def complete(
    gateway: Gateway,
    request: Request,
    accepted: AcceptedJob[OpenAiRequest],
    kind: type[OpenAiResponses],
) -> Response:
    """The answer in OpenAI's shape; its id is the job's, in the body and in `x-request-id`."""
    head = answer_head(accepted, kind)
    responses = builder(head, accepted, kind)
    headers = {"x-request-id": head.id}
    if accepted.request.stream:
        events = completion_events(gateway, accepted, responses)
        return EventStream(
            events, headers=headers, on_disconnect=lambda: abandon(gateway, [accepted])
        )
    try:
        job = await ended_job(gateway, request, accepted)
        if job is None:
            response = Response(status_code=CLIENT_CLOSED_REQUEST)
        else:
            num_tokens = num_named_of(job.result)
            response = await off_loop(lambda: json_response(whole(responses, job)), num_tokens)
    except ShardlineError as error:
        response = respond(error)
    response.headers.update(headers)
    return response


def answer_head(first: AcceptedJob[OpenAiRequest], kind: type[OpenAiResponses]) -> AnswerHead:
    """Returns what all parts of an answer repeat; its id is that of its first job."""
    tier = first.request.service_tier
    return AnswerHead(
        id=f"{kind.prefix}-{first.job_id}",
        created=int(time.time()),
        model=first.model.address,
        system_fingerprint=system_fingerprint(first.model),
        service_tier=UNSET if tier is None else tier_used(tier),
    )


def builder(
    head: AnswerHead,
    accepted: AcceptedJob[OpenAiRequest],
    kind: type[OpenAiResponses],
    index: int = 0,
) -> OpenAiResponses:
    """Returns what builds the answer of one job, which is choice `index`."""
    return kind(
        head=head,
        request=accepted.request,
        tokens=accepted.model.tokens,
        prompt_ids=accepted.prepared.prompt_ids,
        job_id=accepted.job_id,
        index=index,
    )


async def completion_events(
    gateway: Gateway, accepted: AcceptedJob[OpenAiRequest], responses: OpenAiResponses
) -> AsyncGenerator[bytes, None]:
    """The stream's chunks, the usage if wanted, and `[DONE]`. An error in the middle is the last
    event before it."""
    try:
        async for chunk in chunks(gateway, accepted, responses):
            yield event(responses.usage_chunk(chunk)) if isinstance(chunk, Usage) else chunk
    except ShardlineError as error:
        log.warning("completion stream interrupted", job_id=str(accepted.job_id), error=str(error))
        yield event(body_of(error))
    yield DONE


async def chunks(
    gateway: Gateway, accepted: AcceptedJob[OpenAiRequest], responses: OpenAiResponses
) -> AsyncIterator[bytes | Usage]:
    """One job's chunks, then its usage if it was asked for. Raises the reason of an end without a
    completion."""
    began_s = sent_s = time.monotonic()
    keep_alive_s = gateway.settings.http_keep_alive_s
    num_output = 0
    texts = responses.logprob_texts()
    reader = responses.reply_reader()
    if (opening := responses.opening_chunk()) is not None:
        yield event(responses.counted(opening, num_output))
    text_rule = accepted.model.tokens.text_rule
    follow = gateway.client.reader.follow
    async for deltas in follow(accepted.job_id, text_rule=text_rule, tick_s=keep_alive_s):
        now_s = time.monotonic()
        if gateway.stopping.is_set() and not any(delta.state for delta in deltas):
            raise Stopping(accepted.job_id)
        if not deltas:
            if now_s - sent_s >= keep_alive_s:
                sent_s = now_s
                yield KEEP_ALIVE
            continue
        sent_s = now_s
        delta = merged(deltas)
        if num_output == 0:
            gateway.metrics.first_token_seconds.observe(now_s - began_s)
        has_ids = bool(delta.ids) and accepted.request.return_token_ids
        num_tokens = num_named(delta.ids, delta.logprobs)
        reply = await off_loop(partial(reader.read, delta), num_tokens)
        num_output += len(delta.ids)
        if reply != NOTHING or texts.new(delta) is not None or has_ids:
            chunk = partial(responses.chunk, delta, texts, reply)
            yield event(responses.counted(await off_loop(chunk, num_tokens), num_output))
        if delta.state is not None:
            if delta.state != JobState.SUCCEEDED:
                raise await why(gateway, accepted.job_id)
            reason = FinishReason(delta.finish_reason or FinishReason.STOP)
            final = responses.final_chunk(reason, has_calls=reader.has_calls)
            yield event(responses.counted(final, num_output))
            if accepted.request.stream_options.include_usage:
                yield await committed_usage(gateway, accepted, num_output)


async def committed_usage(
    gateway: Gateway, accepted: AcceptedJob[JobRequest], num_output: int
) -> Usage:
    """Returns the usage as it was committed, with what the prefix cache had. A Postgres that is
    away now holds up no stream's end."""
    try:
        usage = await gateway.client.usage(accepted.job_id)
    except Unavailable as error:
        log.warning(
            "a stream's usage could not be read", job_id=str(accepted.job_id), error=str(error)
        )
        usage = None
    return usage or Usage(
        prompt_tokens=len(accepted.prepared.prompt_ids), completion_tokens=num_output
    )


async def why(gateway: Gateway, job_id: UUID) -> ShardlineError:
    """The reason why a job has no completion."""
    try:
        job = await gateway.client.get(job_id)
        succeeded(job)
    except JobEnded as ended:
        return error_of_job(job, ended)
    except ShardlineError as error:
        return error
    return Unavailable("the end of the job could not be read")


def merged(deltas: Sequence[Delta]) -> Delta:
    """One delta for all that arrived together."""
    if len(deltas) == 1:
        return deltas[0]
    logprobs = tuple(entry for delta in deltas for entry in delta.logprobs or ())
    return Delta(
        fence=deltas[-1].fence,
        start=deltas[0].start,
        ids=tuple(token_id for delta in deltas for token_id in delta.ids),
        text="".join(delta.text for delta in deltas),
        logprobs=logprobs or None,
        state=deltas[-1].state,
        finish_reason=deltas[-1].finish_reason,
    )


async def ended_job(
    gateway: Gateway, request: Request, accepted: AcceptedJob[JobRequest]
) -> Job | None:
    """The job once it has ended, or None when the caller left first. Raises Stopping."""
    jobs = await wait_for_ends(gateway, request, [accepted])
    return None if jobs is None else jobs[0]


async def wait_for_ends(
    gateway: Gateway, request: Request, choices: Sequence[AcceptedJob[JobRequest]]
) -> list[Job] | None:
    """The jobs once all have ended, or None when the caller left first. Raises Stopping."""
    ends = [asyncio.create_task(gateway.client.until_ended(one.job_id)) for one in choices]
    waiting = asyncio.gather(*ends)
    leaving = asyncio.create_task(disconnected(request))
    stopping = asyncio.create_task(gateway.stopping.wait())
    events: set[asyncio.Future[Any]] = {waiting, leaving, stopping}
    try:
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        if not leaving.done():
            raise Stopping(choices[0].job_id)
        await abandon(gateway, choices)
        return None
    finally:
        for event in (*events, *ends):
            await cancel_and_wait(event)


async def abandon(gateway: Gateway, choices: Sequence[AcceptedJob[JobRequest]]) -> None:
    """Cancel jobs of a request that no caller waits for or can ask for again."""
    first = choices[0]
    if first.is_repeatable:
        return
    trace = JobTrace.of(first.job_id, first.request.traceparent)
    with job_context(first.job_id, trace_id=trace.trace):
        gateway.metrics.abandoned.inc(len(choices))
        try:
            await gateway.client.cancel([one.job_id for one in choices])
        except Unavailable as error:
            log.warning("abandoned job continues: cancel failed", error=str(error))


def whole(responses: OpenAiResponses, job: Job) -> Completion | ChatCompletion:
    """The answer for a job that has ended. Raises the reason why it has no completion."""
    # From the row, so that a repeat gets the same answer.
    created = int(job.created_at.timestamp())
    return replace(responses.whole(result_of(job)), created=created)


def result_of(job: Job) -> Result:
    """The result of an ended job. Raises JobEnded for one that has not succeeded."""
    try:
        result = succeeded(job).result
    except JobEnded as ended:
        raise error_of_job(job, ended) from ended
    assert result is not None, "a succeeded job has a result"
    return result
