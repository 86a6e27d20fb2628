"""Answers a request with its choices, each of which is a job: whole, or as one stream of all their
chunks. Knows no route.

A choice that fails makes the answer an error, once the others have ended: their rows stay.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import structlog
from fastapi import Request, Response
from msgspec.structs import replace

from services.gateway.bodies import CompletionUsage
from services.gateway.context import Gateway
from services.gateway.errors import CLIENT_CLOSED_REQUEST, body_of, json_response, respond
from services.gateway.http.event_loop import num_named_of, off_loop
from services.gateway.http.sse import DONE, KEEP_ALIVE, EventStream, event
from services.gateway.openai.bodies import ChatCompletion, Completion, OpenAiRequest
from services.gateway.openai.completion_response import (
    abandon,
    answer_head,
    builder,
    chunks,
    complete,
    wait_for_ends,
    whole,
)
from services.gateway.openai.responses import OpenAiResponses
from services.gateway.submit import AcceptedJob
from shardline.base.aio import cancel_and_wait
from shardline.base.errors import JobEnded, ShardlineError
from shardline.contract.job import Job, Usage

log = structlog.get_logger(__name__)

Choices = Sequence[AcceptedJob[OpenAiRequest]]
Answer = Completion | ChatCompletion
Heard = bytes | Usage | Exception | None
"""Of one choice's stream: a chunk, its usage, why it has no completion; None: its end."""


async def complete_choices(
    gateway: Gateway, request: Request, choices: Choices, kind: type[OpenAiResponses]
) -> Response:
    """The answer in OpenAI's shape; its id is that of the first choice's job."""
    if len(choices) == 1:
        return await complete(gateway, request, choices[0], kind)
    head = answer_head(choices[0], kind)
    builders = [builder(head, one, kind, index) for index, one in enumerate(choices)]
    headers = {"x-request-id": head.id}
    if choices[0].request.stream:
        events = choice_events(gateway, choices, builders)
        return EventStream(events, headers=headers, on_disconnect=lambda: abandon(gateway, choices))
    try:
        jobs = await wait_for_ends(gateway, request, choices)
        if jobs is None:
            response = Response(status_code=CLIENT_CLOSED_REQUEST)
        else:
            n = choices[0].request.n
            num_tokens = sum(num_named_of(job.result) for job in jobs)
            response = await off_loop(
                lambda: json_response(whole_choices(builders, jobs, n)), num_tokens
            )
    except ShardlineError as error:
        response = respond(error)
    response.headers.update(headers)
    return response


def whole_choices(builders: Sequence[OpenAiResponses], jobs: Sequence[Job], n: int) -> Answer:
    """One answer for jobs that have ended, `n` for each prompt. Raises the reason of the first one
    without a completion, with its place."""
    answers = []
    for index, (responses, job) in enumerate(zip(builders, jobs, strict=True)):
        try:
            answers.append(whole(responses, job))
        except JobEnded as error:
            raise _placed(error, index, len(jobs)) from error
    pairs = zip(builders, jobs, strict=True)
    usages = [one.shown(job.result).usage for one, job in pairs if job.result is not None]
    choices = [choice for answer in answers for choice in answer.choices]
    usage = CompletionUsage.of(total_usage(usages, n))
    return replace(answers[0], choices=choices, usage=usage)


def total_usage(usages: Sequence[Usage], n: int) -> Usage:
    """Counts each prompt once, as cached what none of its `n` choices had to compute, and all
    output."""
    prompts = [usages[first : first + n] for first in range(0, len(usages), n)]
    cached = [[usage.cached_tokens for usage in each] for each in prompts]
    known = [min(one for one in each if one is not None) for each in cached if None not in each]
    thought = [usage.reasoning_tokens for usage in usages]
    reasoning = [one for one in thought if one is not None]
    return Usage(
        prompt_tokens=sum(each[0].prompt_tokens for each in prompts),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(known) if len(known) == len(prompts) else None,
        reasoning_tokens=sum(reasoning) if len(reasoning) == len(usages) else None,
    )


async def choice_events(
    gateway: Gateway, choices: Choices, builders: Sequence[OpenAiResponses]
) -> AsyncGenerator[bytes, None]:
    """The chunks of all choices as they come, one usage for all if wanted, and `[DONE]`. The error
    of a choice is the last event before it."""
    try:
        async with aclosing(_merged(gateway, choices, builders)) as merged:
            async for chunk in merged:
                yield chunk
    except ShardlineError as error:
        job_id = str(choices[0].job_id)
        log.warning("completion stream interrupted", job_id=job_id, error=str(error))
        yield event(body_of(error))
    yield DONE


async def _merged(
    gateway: Gateway, choices: Choices, builders: Sequence[OpenAiResponses]
) -> AsyncGenerator[bytes, None]:
    """Raises the first error, once all have ended."""
    heard: asyncio.Queue[tuple[int, Heard]] = asyncio.Queue(maxsize=len(choices))
    streams = [
        asyncio.create_task(_hear(gateway, one, responses, heard))
        for one, responses in zip(choices, builders, strict=True)
    ]
    try:
        usages: dict[int, Usage] = {}
        failed: list[Exception] = []
        num_open = len(choices)
        sent_s = time.monotonic()
        while num_open:
            index, what = await heard.get()
            if what is None:
                num_open -= 1
            elif isinstance(what, Usage):
                usages[index] = what
            elif isinstance(what, JobEnded):
                failed.append(_placed(what, index, len(choices)))
            elif isinstance(what, Exception):
                failed.append(what)
            elif what is not KEEP_ALIVE or _is_due(gateway, sent_s):
                sent_s = time.monotonic()
                yield what
        if failed:
            raise failed[0]
        if usages:
            counted = [usages[index] for index in range(len(choices))]
            total = total_usage(counted, choices[0].request.n)
            yield event(builders[0].usage_chunk(total))
    finally:
        for stream in streams:
            await cancel_and_wait(stream)


def _is_due(gateway: Gateway, sent_s: float) -> bool:
    """Whether nothing was sent for a while: each silent choice gets a separate keep-alive."""
    return time.monotonic() - sent_s >= gateway.settings.http_keep_alive_s / 2


async def _hear(
    gateway: Gateway,
    accepted: AcceptedJob[OpenAiRequest],
    responses: OpenAiResponses,
    heard: asyncio.Queue[tuple[int, Heard]],
) -> None:
    """Passes on one choice's stream, no faster than its reader takes it."""
    try:
        async for chunk in chunks(gateway, accepted, responses):
            await heard.put((responses.index, chunk))
    except Exception as error:  # noqa: BLE001 whatever it is, the one who merges must not wait
        await heard.put((responses.index, error))
    await heard.put((responses.index, None))


def _placed(error: JobEnded, index: int, num: int) -> JobEnded:
    """Adds the choice to the error's text; the reason names its job."""
    error.args = (f"choice {index} of {num}: {error}",)
    return error
