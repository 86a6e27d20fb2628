"""From a body to a response: its conversation, its row beside the job's, its answer.

A caller who disconnects cancels the job, unless the request runs in the background or can be
repeated, as with completions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from uuid import UUID

import msgspec
from fastapi import Request, Response
from msgspec.structs import replace

from services.gateway.context import Gateway
from services.gateway.errors import CLIENT_CLOSED_REQUEST, PreviousNotFound, json_response
from services.gateway.guard import Caller
from services.gateway.http.sse import EventStream
from services.gateway.openai.completion_response import abandon, ended_job
from services.gateway.request_body import request_body
from services.gateway.responses.answers import PREFIX, ResponseAnswers, response_id
from services.gateway.responses.conversation import check_outputs, messages_of, without_oldest
from services.gateway.responses.requests import ResponseRequest, items_of, response_request
from services.gateway.responses.response_events import response_events, whole
from services.gateway.submit import read_jobs, submit
from shardline.base.errors import Conflict, ContextExceeded, Invalid, NotFound
from shardline.contract.chat import Message
from shardline.contract.ids import parse_id
from shardline.contract.job import address_of
from shardline.store.inserts import Tokenized, encode_request
from shardline.store.responses import EncodedResponse, NewResponse, ResponseRow, encode_response
from shardline_server.tokenize import Tokens

PREVIOUS = "previous_response_id"


async def create(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """Store a response with its job, and answer: at once in the background, else with its events or
    its end."""
    complete = partial(with_conversation, gateway)
    accepted = await submit(
        gateway, request, caller, response_request, complete=complete, encode=_encode
    )
    row = await _row(gateway, accepted.job_id)
    asked = accepted.request.asked
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


async def with_conversation(gateway: Gateway, request: ResponseRequest) -> ResponseRequest:
    """The request with all that its model reads: the conversation that it goes on with, and of a
    long one, with truncation, the newest part. Raises Invalid."""
    own = request.messages or ()
    messages = own
    if request.asked.previous_response_id is not None:
        before = await _before(gateway, request.asked.previous_response_id, request.tenant)
        num_first = request.asked.instructions is not None
        messages = (*own[:num_first], *before, *own[num_first:])
    check_outputs(messages)
    if request.asked.truncation == "auto":
        model = await gateway.catalog.get(request.address)
        messages = await asyncio.to_thread(_fitting, model.tokens, request, messages)
    return request if messages is own else replace(request, messages=messages)


async def stored_answers(gateway: Gateway, text: str, caller: Caller) -> ResponseAnswers:
    """A stored response of the caller's tenant. Raises NotFound, and Invalid for what is no id."""
    job_id = parse_id(text.removeprefix(PREFIX), "response_id")
    row = await gateway.client.response(job_id)
    if row is None or not _is_open_to(row, caller.tenant):
        raise NotFound(f"no response has the id {response_id(job_id)}")
    return await _answers(gateway, row)


async def _answers(gateway: Gateway, row: ResponseRow) -> ResponseAnswers:
    model = await gateway.catalog.get(address_of(row.job.model, row.job.params.adapter))
    return ResponseAnswers(row=row, tokens=model.tokens)


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
    document = await whole(await _answers(gateway, row))
    if row.job.result is None:
        problem = f"it is {document.status} and has no output"
        raise Invalid(PREVIOUS, problem, "Go on from the one before it")
    messages = msgspec.convert(row.messages, tuple[Message, ...])
    num_first = row.instructions is not None
    return (*messages[num_first:], *messages_of(document.output))


def _fitting(
    tokens: Tokens, request: ResponseRequest, messages: Sequence[Message]
) -> tuple[Message, ...]:
    """The longest end of the conversation that leaves room for the output. Raises Invalid if not
    even the last message does."""
    num_fewest = 0
    num_most = len(messages) - 1
    while num_fewest < num_most:
        num_tried = (num_fewest + num_most) // 2
        if _fits(tokens, request, without_oldest(messages, num_tried)):
            num_most = num_tried
        else:
            num_fewest = num_tried + 1
    return without_oldest(messages, num_fewest)


def _fits(tokens: Tokens, request: ResponseRequest, messages: Sequence[Message]) -> bool:
    try:
        tokens.prepare(messages=messages, params=request.params())
    except ContextExceeded:
        return False
    return True


def _encode(request: ResponseRequest, tokenized: Tokenized) -> EncodedResponse:
    asked = request.asked
    previous = asked.previous_response_id
    new = NewResponse(
        previous_id=None if previous is None else UUID(previous.removeprefix(PREFIX)),
        instructions=asked.instructions,
        input=msgspec.to_builtins(items_of(asked)),
        options=msgspec.to_builtins(asked.options()),
    )
    return encode_response(encode_request(request, tokenized), new)


async def _row(gateway: Gateway, job_id: UUID) -> ResponseRow:
    """The row as it was committed: of a repeat the first one's. Raises Conflict."""
    row = await gateway.client.response(job_id)
    if row is None:
        problem = f"job {job_id} has this id or idempotency key, and is no response any more"
        raise Conflict(f"{problem}; use a new one")
    return row
