"""Anthropic's doors: `POST /v1/messages`, and what a request to it would cost in tokens."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from services.gateway.anthropic.answers import MessageAnswer, TokenCount
from services.gateway.anthropic.bodies import CountTokensBody, MessagesBody
from services.gateway.anthropic.description import (
    IDS,
    message_body,
    message_errors,
    message_events,
)
from services.gateway.anthropic.message_response import message
from services.gateway.anthropic.requests import (
    OWN,
    OWN_COUNTED,
    counted_request,
    message_request,
)
from services.gateway.context import GatewayDep
from services.gateway.errors import json_response
from services.gateway.guard import SubmitCaller
from services.gateway.http.json_body import read_object
from services.gateway.request_body import request_body
from services.gateway.schemas import GUARDED, TAKING, answer
from services.gateway.submit import submit

router = APIRouter(
    tags=["Anthropic"],
    default_response_class=Response,
    responses=message_errors(*GUARDED, *TAKING, 504),
)

STREAMED = "With `stream` as server-sent events in Anthropic's form; an error is the last one"


@router.post(
    "/v1/messages",
    openapi_extra=message_body(MessagesBody, OWN),
    responses={200: answer(STREAMED, MessageAnswer, message_events(), headers=IDS)},
)
async def create_message(request: Request, gateway: GatewayDep, caller: SubmitCaller) -> Response:
    """Answer messages in Anthropic's form, whole or as a stream."""
    accepted = await submit(gateway, request, caller, message_request)
    return await message(gateway, request, accepted)


@router.post(
    "/v1/messages/count_tokens",
    openapi_extra=message_body(CountTokensBody, OWN_COUNTED),
    responses={200: answer("The prompt's tokens", TokenCount, headers=IDS)},
)
async def count_tokens(request: Request, gateway: GatewayDep, _caller: SubmitCaller) -> Response:
    """The number of tokens of a prompt, with tools and chat template. Stores nothing."""
    async with request_body(gateway, request) as body:
        counted = await body.run(lambda: counted_request(read_object(body.data)))
        model = await gateway.catalog.get(counted.address)
        ids = await body.run(model.tokens.chat_ids, counted.messages, counted.params())
    return json_response(TokenCount(input_tokens=len(ids)))
