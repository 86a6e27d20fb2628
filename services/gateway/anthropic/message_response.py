"""Waits for a job and answers its caller with a message, whole or as a stream. Knows no route.

A caller who disconnects cancels the job by the rule of OpenAI's routes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from typing import Any

import structlog
from fastapi import Request, Response

from services.gateway.anthropic.answers import MessageEvent, Ping
from services.gateway.anthropic.error_form import error_form
from services.gateway.anthropic.messages import MessageEvents, MessageParts
from services.gateway.anthropic.requests import MessageRequest
from services.gateway.context import Gateway
from services.gateway.errors import (
    CLIENT_CLOSED_REQUEST,
    Stopping,
    body_of,
    json_response,
    respond,
    status_of,
)
from services.gateway.http.event_loop import num_named_of, off_loop
from services.gateway.http.sse import EventStream, event
from services.gateway.openai.completion_response import (
    abandon,
    committed_usage,
    ended_job,
    merged,
    result_of,
    why,
)
from services.gateway.submit import AcceptedJob
from shardline.base.errors import ShardlineError
from shardline.contract.job import FinishReason, JobState

log = structlog.get_logger(__name__)

AcceptedMessage = AcceptedJob[MessageRequest]


async def message(gateway: Gateway, request: Request, accepted: AcceptedMessage) -> Response:
    """The answer in Anthropic's form; its id is the job's, in the body and in `request-id`."""
    parts = MessageParts(
        job_id=accepted.job_id,
        model=accepted.model.address,
        request=accepted.request,
        tokens=accepted.model.tokens,
        prompt_ids=accepted.prepared.prompt_ids,
        max_tokens=accepted.prepared.max_tokens,
    )
    headers = {"x-request-id": parts.id}
    if accepted.request.stream:
        events = message_events(gateway, accepted, parts)
        return EventStream(
            events, headers=headers, on_disconnect=lambda: abandon(gateway, [accepted])
        )
    try:
        job = await ended_job(gateway, request, accepted)
        if job is None:
            response = Response(status_code=CLIENT_CLOSED_REQUEST)
        else:
            answer = partial(parts.whole, result_of(job))
            response = json_response(await off_loop(answer, num_named_of(job.result)))
    except ShardlineError as error:
        response = respond(error)
    response.headers.update(headers)
    return response


async def message_events(
    gateway: Gateway, accepted: AcceptedMessage, parts: MessageParts
) -> AsyncGenerator[bytes, None]:
    """The stream's events; an error in the middle is the last one."""
    try:
        async for one in _events(gateway, accepted, parts):
            yield _event(one)
    except ShardlineError as error:
        log.warning("message stream interrupted", job_id=str(accepted.job_id), error=str(error))
        yield _event(error_form(body_of(error), status_of(error), parts.id))


async def _events(
    gateway: Gateway, accepted: AcceptedMessage, parts: MessageParts
) -> AsyncIterator[MessageEvent]:
    began_s = sent_s = time.monotonic()
    keep_alive_s = gateway.settings.http_keep_alive_s
    events = MessageEvents(parts)
    num_output = 0
    for one in events.begin():
        yield one
    text_rule = accepted.model.tokens.text_rule
    reader = gateway.client.reader
    async for deltas in reader.follow(accepted.job_id, text_rule=text_rule, tick_s=keep_alive_s):
        now_s = time.monotonic()
        if gateway.stopping.is_set() and not any(delta.state for delta in deltas):
            raise Stopping(accepted.job_id)
        if not deltas:
            if now_s - sent_s >= keep_alive_s:
                sent_s = now_s
                yield Ping()
            continue
        sent_s = now_s
        delta = merged(deltas)
        if num_output == 0:
            gateway.metrics.first_token_seconds.observe(now_s - began_s)
        num_output += len(delta.ids)
        for one in await off_loop(partial(events.push, delta), len(delta.ids)):
            yield one
        if delta.state is not None:
            if delta.state != JobState.SUCCEEDED:
                raise await why(gateway, accepted.job_id)
            reason = FinishReason(delta.finish_reason or FinishReason.STOP)
            usage = await committed_usage(gateway, accepted, num_output)
            for one in events.end(reason, usage):
                yield one


def _event(document: Any) -> bytes:
    """An event with the name that its data has as `type`."""
    return event(document, name=str(document.__struct_config__.tag))
