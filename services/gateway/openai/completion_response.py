"""Waits for a job and answers its caller, with the whole completion or a stream. Knows no route.

A caller who disconnects cancels the job, unless the request can be repeated: with an id or a key of
the caller's own the repeat finds the same job.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from uuid import UUID

import structlog
from fastapi import Request, Response

from services.gateway.catalog import system_fingerprint
from services.gateway.context import Gateway
from services.gateway.errors import (
    CLIENT_CLOSED_REQUEST,
    Stopping,
    body_of,
    error_of_job,
    json_response,
    respond,
)
from services.gateway.http.sse import DONE, KEEP_ALIVE, EventStream, disconnected, event
from services.gateway.openai.bodies import AnswerHead, OpenAiRequest
from services.gateway.openai.responses import OpenAiResponses
from services.gateway.submit import AcceptedJob
from shardline.base.aio import cancel_and_wait
from shardline.base.errors import JobEnded, ShardlineError, Unavailable
from shardline.base.log import job_context
from shardline.base.tracing import JobTrace
from shardline.client.requests import succeeded
from shardline.contract.job import FinishReason, Job, JobState, Usage
from shardline.contract.wire import Delta

log = structlog.get_logger(__name__)


async def complete(
    gateway: Gateway,
    request: Request,
    accepted: AcceptedJob[OpenAiRequest],
    kind: type[OpenAiResponses],
) -> Response:
    """The answer in OpenAI's shape; its id is the job's, in the body and in `x-request-id`."""
    head = AnswerHead(
        id=f"{kind.prefix}-{accepted.job_id}",
        created=int(time.time()),
        model=accepted.model.address,
        system_fingerprint=system_fingerprint(accepted.model),
    )
    responses = kind(
        head=head,
        request=accepted.request,
        tokens=accepted.model.tokens,
        prompt_ids=accepted.prepared.prompt_ids,
    )
    headers = {"x-request-id": head.id}
    if accepted.request.stream:
        events = completion_events(gateway, accepted, responses)
        return EventStream(
            events, headers=headers, on_disconnect=lambda: _abandon(gateway, accepted)
        )
    try:
        job = await _wait(gateway, request, accepted)
        response = (
            Response(status_code=CLIENT_CLOSED_REQUEST) if job is None else _whole(responses, job)
        )
    except ShardlineError as error:
        response = respond(error)
    response.headers.update(headers)
    return response


async def completion_events(
    gateway: Gateway, accepted: AcceptedJob[OpenAiRequest], responses: OpenAiResponses
) -> AsyncGenerator[bytes, None]:
    """The stream's chunks, the usage if wanted, and `[DONE]`. An error in the middle is the last
    event before it."""
    try:
        async for chunk in _chunks(gateway, accepted, responses):
            yield chunk
    except ShardlineError as error:
        log.warning("completion stream interrupted", job_id=str(accepted.job_id), error=str(error))
        yield event(body_of(error))
    yield DONE


async def _chunks(
    gateway: Gateway, accepted: AcceptedJob[OpenAiRequest], responses: OpenAiResponses
) -> AsyncIterator[bytes]:
    began_s = sent_s = time.monotonic()
    keep_alive_s = gateway.settings.http_keep_alive_s
    num_output = 0
    texts = responses.logprob_texts()
    if (opening := responses.opening_chunk()) is not None:
        yield event(opening)
    text_rule = accepted.model.tokens.text_rule
    reader = gateway.client.reader
    async for deltas in reader.follow(accepted.job_id, text_rule=text_rule, tick_s=keep_alive_s):
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
        if delta.text or texts.new(delta) is not None or has_ids:
            yield event(responses.chunk(delta, texts))
        num_output += len(delta.ids)
        if delta.state is not None:
            if delta.state != JobState.SUCCEEDED:
                raise await why(gateway, accepted.job_id)
            reason = FinishReason(delta.finish_reason or FinishReason.STOP)
            yield event(responses.final_chunk(reason))
            if accepted.request.stream_options.include_usage:
                yield event(responses.usage_chunk(await _usage(gateway, accepted, num_output)))


async def _usage(gateway: Gateway, accepted: AcceptedJob[OpenAiRequest], num_output: int) -> Usage:
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


async def _wait(
    gateway: Gateway, request: Request, accepted: AcceptedJob[OpenAiRequest]
) -> Job | None:
    """The ended job, or None when the caller left first. Raises Stopping."""
    waiting = asyncio.create_task(gateway.client.until_ended(accepted.job_id))
    leaving = asyncio.create_task(disconnected(request))
    stopping = asyncio.create_task(gateway.stopping.wait())
    try:
        await asyncio.wait({waiting, leaving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        if not leaving.done():
            raise Stopping(accepted.job_id)
        await _abandon(gateway, accepted)
        return None
    finally:
        for task in (waiting, leaving, stopping):
            await cancel_and_wait(task)


async def _abandon(gateway: Gateway, accepted: AcceptedJob[OpenAiRequest]) -> None:
    """Cancel a job that no caller waits for or can ask for again."""
    if accepted.is_repeatable:
        return
    trace = JobTrace.of(accepted.job_id, accepted.request.traceparent)
    with job_context(accepted.job_id, trace_id=trace.trace):
        gateway.metrics.abandoned.inc()
        try:
            await gateway.client.cancel(accepted.job_id)
        except Unavailable as error:
            log.warning("abandoned job continues: cancel failed", error=str(error))


def _whole(responses: OpenAiResponses, job: Job) -> Response:
    try:
        result = succeeded(job).result
    except JobEnded as ended:
        raise error_of_job(job, ended) from ended
    assert result is not None, "a succeeded job has a result"
    return json_response(responses.whole(result))
