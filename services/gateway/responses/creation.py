"""Makes a response from a body: its conversation, its row, its job's row, its answer.

A caller who disconnects cancels the job, unless the request runs in the background or can be
repeated, as with completions.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from uuid import UUID

import msgspec
from fastapi import Request, Response
from msgspec.structs import replace

from services.gateway.context import Gateway
from services.gateway.errors import CLIENT_CLOSED_REQUEST, PreviousNotFound, json_response
from services.gateway.field_names import renaming
from services.gateway.guard import Caller
from services.gateway.http.query import path_id
from services.gateway.http.sse import EventStream
from services.gateway.openai.completion_response import abandon, ended_job
from services.gateway.patient_reading import read_patiently
from services.gateway.request_body import request_body
from services.gateway.responses.answers import PREFIX, ResponseAnswers, response_id
from services.gateway.responses.conversation import (
    beginnings,
    check_outputs,
    from_place,
    messages_of,
)
from services.gateway.responses.references import with_referenced
from services.gateway.responses.requests import (
    ResponseRequest,
    field_names,
    kept_items_of,
    response_request,
)
from services.gateway.responses.response_events import answers_of, response_events, whole
from services.gateway.submit import AcceptedJob, read_jobs, store_jobs
from shardline.base.errors import Conflict, ContextExceeded, Invalid, NotFound, Unavailable
from shardline.contract.chat import Message
from shardline.store.inserts import Tokenized, encode_request
from shardline.store.responses import EncodedResponse, NewResponse, ResponseRow, encode_response
from shardline_server.tokenize import Tokens

PREVIOUS = "previous_response_id"


async def create(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """Store a response with its job, and answer: at once in the background, else with its events or
    its end."""
    accepted = await _submit(gateway, request, caller)
    asked = accepted.request.asked
    try:
        row = await _row(gateway, accepted.job_id)
    except Unavailable:
        # Its caller gets this error, and no id to ask for it.
        await abandon(gateway, [accepted])
        raise
    headers = {"x-request-id": response_id(accepted.job_id)}
    if asked.stream:
        answers = ResponseAnswers(row=row, tokens=accepted.model.tokens)
        leave = None if asked.background else partial(abandon, gateway, [accepted])
        return EventStream(response_events(gateway, answers), headers=headers, on_disconnect=leave)
    if not asked.background:
        if await ended_job(gateway, request, accepted) is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        row = await _row(gateway, accepted.job_id)
    answers = ResponseAnswers(row=row, tokens=accepted.model.tokens)
    return json_response(await whole(answers), headers=headers)


async def count_input(gateway: Gateway, request: Request, caller: Caller) -> int:
    """Returns the number of tokens that a response would read. Stores nothing."""
    async with request_body(gateway, request) as body:
        (asked,) = await read_jobs(
            body, request, caller, lambda document: (response_request(document),)
        )
        if (completed := await with_conversation(gateway, asked)) is not asked:
            asked = completed
            # What was added may be long, however short the body is.
            body.is_large = True
        model = await gateway.catalog.get(asked.address)
        messages = asked.messages or ()
        return len(await body.run(model.tokens.chat_ids, messages, asked.params()))


async def _submit(
    gateway: Gateway, request: Request, caller: Caller
) -> AcceptedJob[ResponseRequest]:
    async with request_body(gateway, request) as body:
        (parsed,) = await read_jobs(
            body, request, caller, lambda document: (response_request(document),)
        )
        with renaming(field_names(parsed.asked)):
            completed = await with_conversation(gateway, parsed)
            # What was added may be long, however short the body is.
            body.is_large |= completed is not parsed
            (accepted,) = await store_jobs(gateway, body, (completed,), encode)
    return accepted


async def with_conversation(gateway: Gateway, request: ResponseRequest) -> ResponseRequest:
    """The request with all that its model reads: the items that it refers to, the conversation that
    it goes on with, and of a long one, with truncation, the newest part. Raises Invalid."""
    request = await with_referenced(gateway, request)
    own = request.messages or ()
    messages = own
    if request.asked.previous_response_id is not None:
        before = await _before(gateway, request.asked.previous_response_id, request.tenant)
        num_first = request.asked.instructions is not None
        messages = (*own[:num_first], *before, *own[num_first:])
    check_outputs(messages)
    if request.asked.truncation == "auto":
        model = await gateway.catalog.get(request.address)
        messages = await asyncio.to_thread(fitting, model.tokens, request, messages)
    return request if messages is own else replace(request, messages=messages)


async def stored_answers(gateway: Gateway, text: str, caller: Caller) -> ResponseAnswers:
    """A stored response of the caller's tenant, to be answered with. Raises what `stored_row`
    raises, and UnknownModel where its model is not registered."""
    return await answers_of(gateway, await stored_row(gateway, text, caller))


async def stored_row(gateway: Gateway, text: str, caller: Caller) -> ResponseRow:
    """The row of a stored response of the caller's tenant. Raises NotFound."""
    job_id = path_id(text, PREFIX)
    row = await gateway.client.response(job_id)
    if row is None or not _is_open_to(row, caller.tenant):
        raise NotFound(f"no response has the id {response_id(job_id)}")
    return row


def _is_open_to(row: ResponseRow, tenant: str) -> bool:
    return row.job.tenant == tenant and bool(row.options.get("store"))


async def _before(gateway: Gateway, text: str, tenant: str) -> tuple[Message, ...]:
    """The conversation of an earlier response, without its instructions and with its output. One
    row has all of it. Raises Invalid."""
    try:
        job_id = UUID(text.removeprefix(PREFIX))
    except ValueError:
        job_id = None
    row = None if job_id is None else await gateway.client.response(job_id)
    if row is None or not _is_open_to(row, tenant):
        problem = f"no response has the id {text[:64]!r}"
        raise PreviousNotFound(PREVIOUS, problem, "Send the id of one that is stored")
    if not row.job.state.terminal:
        problem = f"it is {row.job.state}"
        raise Invalid(PREVIOUS, problem, "Wait for its end, or cancel it")
    document = await whole(await answers_of(gateway, row))
    if row.job.result is None:
        problem = f"it is {document.status} and has no output"
        raise Invalid(PREVIOUS, problem, "Go on from the one before it")
    messages = msgspec.convert(row.messages, tuple[Message, ...])
    num_first = row.instructions is not None
    return (*messages[num_first:], *messages_of(document.output))


def fitting(
    tokens: Tokens, request: ResponseRequest, messages: Sequence[Message]
) -> tuple[Message, ...]:
    """The longest end of the conversation that leaves room for the output; the shortest, which is
    refused later, where none does. Raises Invalid."""
    params = request.params()

    def fits(place: int) -> bool:
        try:
            num_prompt = len(tokens.chat_ids(from_place(messages, place), params))
        except ContextExceeded:
            return False
        return num_prompt + max(params.max_tokens or 1, params.min_tokens) <= tokens.longest

    places = beginnings(messages)
    longest = bisect_left(places, True, hi=len(places) - 1, key=fits)
    return from_place(messages, places[longest])


def encode(requests: Sequence[ResponseRequest], tokenized: Sequence[Tokenized]) -> EncodedResponse:
    """The row of a prepared response with that of its job. Raises Invalid."""
    (request,) = requests
    asked = request.asked
    previous = asked.previous_response_id
    new = NewResponse(
        previous_id=None if previous is None else UUID(previous.removeprefix(PREFIX)),
        instructions=asked.instructions,
        input=msgspec.to_builtins(kept_items_of(asked)),
        options=msgspec.to_builtins(asked.options()),
    )
    return encode_response(encode_request(request, *tokenized), new)


async def _row(gateway: Gateway, job_id: UUID) -> ResponseRow:
    """The row as it was committed: of a repeat the first one's. Raises Conflict, and Unavailable
    where Postgres does not come back in time."""
    name = response_id(job_id)
    failure = f"The response was stored: GET /v1/responses/{name}"
    read = partial(gateway.client.response, job_id)
    row = [found async for found in read_patiently(gateway.settings, read, failure=failure)][-1]
    if row is None:
        problem = f"job {job_id} has this id or idempotency key, and is no response any more"
        raise Conflict(f"{problem}; use a new one")
    return row
